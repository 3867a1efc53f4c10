"""Presets of the published Qwen3 models with experts (their config.json on the Hub). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.common.args import ModelArgs, MoEArgs

_30B_A3B = ModelArgs(
    dim=2048,
    n_layers=48,
    n_heads=32,
    n_kv_heads=4,
    ffn_dim=6144,  # of blocks without experts; the published models have none
    vocab_size=151936,
    head_dim=128,
    norm_eps=1e-6,
    rope_theta=1e6,
    max_seq_len=40960,
    qk_norm=True,
    family="qwen3_moe",
    moe=MoEArgs(num_experts=128, top_k=8, ffn_dim=768, route_norm=True),
)

PRESETS = {
    "qwen3_moe": {
        "debugmodel": replace(
            _30B_A3B, dim=256, n_layers=6, n_heads=4, n_kv_heads=2, ffn_dim=768, vocab_size=2048,
            tie_embeddings=True, moe=MoEArgs(num_experts=8, top_k=2, ffn_dim=256, route_norm=True),
        ),
        "30B-A3B": _30B_A3B,
        "235B-A22B": replace(
            _30B_A3B, dim=4096, n_layers=94, n_heads=64, ffn_dim=12288,
            moe=MoEArgs(num_experts=128, top_k=8, ffn_dim=1536, route_norm=True),
        ),
    }
}  # fmt: skip
