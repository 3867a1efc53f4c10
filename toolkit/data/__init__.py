"""Text in, batches out: tokenizers, sources, token cache, global order, packing and the loader."""
