"""Tokenizers, loaded from the files of a model."""
