"""How a model is spread over devices: mesh, sharding, activation checkpointing, initial weights."""
