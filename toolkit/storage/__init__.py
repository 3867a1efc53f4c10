"""Object storage by its URLs: what stands for a path there, and the calls behind it. Imports no torch."""
