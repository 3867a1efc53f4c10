"""Training of language models with PyTorch, from one TOML file."""

__version__ = "0.2.0"
