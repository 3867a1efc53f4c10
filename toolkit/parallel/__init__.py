"""FSDP, tensor, context and pipeline parallelism, activation checkpointing, torch.compile, float8, and
initial weights that are the same on any mesh."""
