"""Evaluate a model: perplexity on text, and tasks of lm-evaluation-harness."""
