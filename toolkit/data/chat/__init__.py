"""Conversations as prompts: the formats of families, and the templates that models bring."""
