"""The health of a run: unsound numbers, slow ranks, and signs of life."""
