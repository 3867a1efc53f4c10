"""Training of Llama-family models with PyTorch, from one TOML file."""

__version__ = "0.1.0"
