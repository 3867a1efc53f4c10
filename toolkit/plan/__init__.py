"""What a run would be, without running it."""
