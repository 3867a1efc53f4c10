"""Evaluation of a model: the perplexity of text, and the tasks of lm-evaluation-harness."""
