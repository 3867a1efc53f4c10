"""Generate text: KV cache, sampling and the generation loop."""
