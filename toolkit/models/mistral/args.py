"""Presets of the published Mistral models (from config.json at Hugging Face). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.common.args import ModelArgs

_7B = ModelArgs(
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=14336,
    vocab_size=32000,
    head_dim=128,
    rope_theta=1e6,
    max_seq_len=32768,
    family="mistral",
)
_DEBUG = replace(_7B, dim=256, n_layers=6, n_heads=8, n_kv_heads=2, ffn_dim=768, vocab_size=2048, head_dim=32)

PRESETS = {
    "mistral0.1": {
        # The window is shorter than a debug sequence.
        "debugmodel": replace(_DEBUG, rope_theta=1e4, sliding_window=16),
        "7B": replace(_7B, rope_theta=1e4, sliding_window=4096),
    },
    "mistral0.2": {"debugmodel": _DEBUG, "7B": _7B},
    "mistral0.3": {"debugmodel": _DEBUG, "7B": replace(_7B, vocab_size=32768)},
    "mistral-nemo": {
        "debugmodel": replace(_DEBUG, head_dim=48),
        "12B": replace(_7B, dim=5120, n_layers=40, vocab_size=131072, max_seq_len=128000),
    },
}
