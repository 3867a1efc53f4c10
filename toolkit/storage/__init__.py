"""Object storage by URL: paths, and calls with retries. Imports no torch."""
