"""Checkpoints with atomic commits and verified contents."""
