"""Ways to spread a model over devices and to make it fit: FSDP, tensor, context and pipeline parallelism,
activation checkpointing, compiling, and initial weights that are the same on any mesh."""
