"""Conversations as prompts: the formats of Llama 2 and 3, and the templates that models bring."""
