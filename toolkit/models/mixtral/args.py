"""Presets of the published Mixtral models (their config.json at Hugging Face). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.common.args import ModelArgs, MoEArgs

_8X7B = ModelArgs(
    dim=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim=14336,
    vocab_size=32000,
    head_dim=128,
    rope_theta=1e6,
    max_seq_len=32768,
    family="mixtral",
    moe=MoEArgs(num_experts=8, top_k=2, ffn_dim=14336, route_norm=True),
)

PRESETS = {
    "mixtral": {
        "debugmodel": replace(
            _8X7B, dim=256, n_layers=6, n_heads=4, n_kv_heads=2, ffn_dim=256, vocab_size=2048, head_dim=64,
            moe=MoEArgs(num_experts=8, top_k=2, ffn_dim=256, route_norm=True),
        ),
        "8x7B": _8X7B,
        "8x22B": replace(
            _8X7B, dim=6144, n_layers=56, n_heads=48, ffn_dim=16384, max_seq_len=65536,
            moe=MoEArgs(num_experts=8, top_k=2, ffn_dim=16384, route_norm=True),
        ),
    }
}  # fmt: skip
