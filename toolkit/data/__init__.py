"""Text in, batches out: tokenizers, corpora, token caches, sample order, packing and the loader."""
