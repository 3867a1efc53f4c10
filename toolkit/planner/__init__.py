"""Estimates without training: memory, communication and step time of a run, dry runs and layout search."""
