"""Presets of the published Llama models by ``model.name`` and ``model.flavor``. Imports no torch.

``llama3`` has torchtitan's presets, which scale RoPE by 8 at every size. The other names are Meta's releases.
Each name has a ``debugmodel`` of a few million parameters that trains on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.models.common.args import ModelArgs, RopeScaling, vocab_from_tokenizer


def meta_ffn_dim(dim: int, multiplier: float, multiple_of: int) -> int:
    """Return the feed-forward width by Meta's rule: 2/3 of 4·dim, times ``multiplier``, rounded up to a
    multiple of ``multiple_of``.

    Raises:
        OverflowError: the width is infinite.
    """
    return -(-int(multiplier * int(8 * dim / 3)) // multiple_of) * multiple_of


@dataclass(frozen=True)
class _Size:
    """Sizes as in Meta's ``params.json``; the last two fields determine the feed-forward width."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_multiplier: float = 1.0
    ffn_multiple_of: int = 256

    def ffn_dim(self, dim: int) -> int:
        return meta_ffn_dim(dim, self.ffn_multiplier, self.ffn_multiple_of)


@dataclass(frozen=True)
class _Release:
    sizes: dict[str, _Size]
    vocab_size: int = 128256
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 131072
    debug_max_seq_len: int = 2048
    tie_embeddings: bool = False

    def args(self, flavor: str) -> ModelArgs:
        size = self.sizes[flavor]
        debug = vocab_from_tokenizer(flavor)
        return ModelArgs(
            dim=size.dim,
            n_layers=size.n_layers,
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            ffn_dim=size.ffn_dim(size.dim),
            vocab_size=_DEBUG_VOCAB if debug else self.vocab_size,
            head_dim=size.dim // size.n_heads,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            max_seq_len=self.debug_max_seq_len if debug else self.max_seq_len,
            tie_embeddings=self.tie_embeddings,
        )


# Default vocabulary size of a debug model without a tokenizer, as in torchtitan.
_DEBUG_VOCAB = 2048
_DEBUG = _Size(256, 6, 16, 16)
_8B = _Size(4096, 32, 32, 8, 1.3, 1024)
_70B = _Size(8192, 80, 64, 8, 1.3, 4096)
_405B = _Size(16384, 126, 128, 8, 1.2, 4096)

_RELEASES = {
    "llama2": _Release(
        {"debugmodel": _DEBUG, "7B": _Size(4096, 32, 32, 32), "13B": _Size(5120, 40, 40, 40), "70B": _70B},
        vocab_size=32000,
        rope_theta=10000.0,
        max_seq_len=4096,
    ),
    "llama3.0": _Release({"debugmodel": _DEBUG, "8B": _8B, "70B": _70B}, max_seq_len=8192),
    "llama3.1": _Release(
        {"debugmodel": _DEBUG, "8B": _8B, "70B": _70B, "405B": _405B}, rope_scaling=RopeScaling(8.0)
    ),
    "llama3.2": _Release(
        {
            "debugmodel": _DEBUG,
            "1B": _Size(2048, 16, 32, 8, 1.5, 256),
            "3B": _Size(3072, 28, 24, 8, 1.0, 256),
        },
        rope_scaling=RopeScaling(32.0),
        tie_embeddings=True,
    ),
    "llama3.3": _Release({"debugmodel": _DEBUG, "70B": _70B}, rope_scaling=RopeScaling(8.0)),
    "llama3": _Release(
        {
            # torchtitan puts the attention backend into the flavor's name; the sizes are the same.
            "debugmodel": _DEBUG,
            "debugmodel_flex_attn": _DEBUG,
            "debugmodel_varlen_attn": _DEBUG,
            "8B": _8B,
            "8B_flex": _8B,
            "8B_varlen": _8B,
            "70B": _70B,
            "405B": _405B,
        },
        rope_scaling=RopeScaling(8.0),
        debug_max_seq_len=131072,
    ),
}

PRESETS: dict[str, dict[str, ModelArgs]] = {
    name: {flavor: release.args(flavor) for flavor in release.sizes} for name, release in _RELEASES.items()
}


def ffn_rule(name: str, flavor: str) -> Callable[[int], int]:
    """Return the function from ``dim`` to feed-forward width, with the preset's multiplier and multiple."""
    return _RELEASES[name].sizes[flavor].ffn_dim
