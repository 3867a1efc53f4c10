"""Reports of a run: console, metrics.jsonl, TensorBoard, W&B, speed, memory, profiles, time of the start."""
