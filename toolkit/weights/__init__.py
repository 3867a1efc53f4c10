"""Formats of weights on disk, read by region and written by stream; conversion from one to another."""
