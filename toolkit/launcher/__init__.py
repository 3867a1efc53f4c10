"""Start the ranks of a machine, watch them, and report failed ranks."""
