"""What a run tells its user: console, metrics.jsonl, TensorBoard, speed, memory and phases."""
