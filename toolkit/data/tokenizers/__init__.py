"""Tokenizers, loaded from a model's files."""
