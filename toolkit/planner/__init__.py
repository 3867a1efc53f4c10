"""Descriptions of a run that is not made: its memory, what its ranks send, a dry run."""
