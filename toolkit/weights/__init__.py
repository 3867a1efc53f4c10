"""Formats of weights on disk: Hugging Face and Meta folders, read by region and written by stream."""
