"""Rules about corpora."""
