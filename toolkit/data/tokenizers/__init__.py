"""Tokenizers, read from the files that they come in."""
