"""Process groups, time-outs, seeds and garbage collection."""
