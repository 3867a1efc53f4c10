"""Text generation, with KV cache, sampling and the generation loop."""
