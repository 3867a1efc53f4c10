"""Evaluate a model: perplexity of text, and tasks of lm-evaluation-harness."""
