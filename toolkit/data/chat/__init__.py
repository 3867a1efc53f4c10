"""Conversion of conversations to prompts: chat formats of model families, and chat templates of models."""
