"""Presets of the text models of Llama 4 (from config.json on the Hub). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.common.args import IRoPEArgs, ModelArgs, MoEArgs, RopeScaling

_SCOUT = ModelArgs(
    dim=5120,
    n_layers=48,
    n_heads=40,
    n_kv_heads=8,
    ffn_dim=16384,
    vocab_size=202048,
    head_dim=128,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(16.0, low_freq_factor=1.0, high_freq_factor=1.0),
    max_seq_len=10485760,
    sliding_window=8192,
    full_attention_step=4,
    family="llama4",
    moe=MoEArgs(
        num_experts=16, top_k=1, ffn_dim=8192, num_shared_experts=1, score_func="sigmoid",
        score_before_experts=True,
    ),
    irope=IRoPEArgs(),
)  # fmt: skip
assert _SCOUT.moe is not None

PRESETS = {
    "llama4": {
        # Chunks and steps of the temperature are shorter than a debug sequence.
        "debugmodel": replace(
            _SCOUT, dim=256, n_layers=6, n_heads=8, n_kv_heads=2, ffn_dim=512, vocab_size=2048, head_dim=32,
            sliding_window=16, irope=IRoPEArgs(temperature_floor=16),
            moe=replace(_SCOUT.moe, num_experts=8, ffn_dim=256, step=2),
        ),
        "17B-16E": _SCOUT,
        "17B-128E": replace(
            _SCOUT, rope_scaling=None, max_seq_len=1048576, irope=IRoPEArgs(qk_norm=False),
            moe=replace(_SCOUT.moe, num_experts=128, step=2),
        ),
    }
}  # fmt: skip
