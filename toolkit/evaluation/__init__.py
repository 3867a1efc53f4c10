"""How good a model is: the perplexity of text, and the tasks of lm-evaluation-harness."""
