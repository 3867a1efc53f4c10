"""File utilities: atomic writes, locks, and bounded reads."""
