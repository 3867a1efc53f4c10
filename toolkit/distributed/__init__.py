"""Process groups, agreement between ranks, seeds and garbage collection."""
