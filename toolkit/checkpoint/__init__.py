"""Checkpoints that are complete and verified, or do not exist."""
