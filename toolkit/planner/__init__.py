"""What a run would be, without running it: its memory, what its ranks send, a dry run."""
