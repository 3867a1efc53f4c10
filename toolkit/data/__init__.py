"""Text in, batches out: tokenizers, corpora, token cache, global order, packing and the loader."""
