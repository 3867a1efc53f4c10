"""Process groups, agreement among ranks, seeds and garbage collection."""
