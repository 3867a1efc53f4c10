"""Forecast a run without training: its memory, communication and step time, dry runs and layout search."""
