"""Tokenizers of Llama and its relatives, read from the files that they come in."""
