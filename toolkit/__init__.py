"""Training of language models with PyTorch, from one TOML file.

The names of the public Python API (``toolkit/api.py``) can be imported from here; docs/python.md shows how.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
__all__ = [
    "Config", "Decoder", "GlobalBatches", "Trainer", "build_optimizer", "export_hf", "generate",
    "init_weights", "learning_rate", "load_checkpoint", "load_config", "load_model", "load_weights",
    "new_model", "open_data", "run", "save_checkpoint", "start",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the API on first use of one of its names, because the preflight must not import torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("toolkit.api"), name)
