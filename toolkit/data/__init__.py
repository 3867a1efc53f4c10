"""Conversion of text to batches: tokenizers, corpora, token caches, sample order, packing and the loader."""
