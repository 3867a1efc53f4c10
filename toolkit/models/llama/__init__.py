"""Llama 2, 3, 3.1, 3.2 and 3.3: presets, the model, and how it may be cut over devices."""
