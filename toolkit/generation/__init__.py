"""Text out of a model: the cache of keys and values, the choice of tokens, and the loop around both."""
