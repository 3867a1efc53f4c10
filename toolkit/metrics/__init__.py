"""Metrics of a run: console, metrics.jsonl, TensorBoard, W&B, speed, memory, profiles and startup time."""
