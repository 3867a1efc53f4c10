"""Presets of DeepSeek-V2 and V2-Lite (from config.json at Hugging Face). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.common.args import MLAArgs, ModelArgs, MoEArgs, YarnScaling

_16B = ModelArgs(
    dim=2048,
    n_layers=27,
    n_heads=16,
    n_kv_heads=16,
    ffn_dim=10944,
    vocab_size=102400,
    head_dim=192,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=YarnScaling(40.0, 4096, attention_factor=1.0, mscale_all_dim=0.707),
    max_seq_len=163840,
    family="deepseek_v2",
    moe=MoEArgs(num_experts=64, top_k=6, ffn_dim=1408, num_shared_experts=2, first_dense=1),
    mla=MLAArgs(q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
)

PRESETS = {
    "deepseek_v2": {
        "debugmodel": replace(
            _16B, dim=256, n_layers=6, n_heads=4, n_kv_heads=4, ffn_dim=768, vocab_size=2048, head_dim=96,
            max_seq_len=4096, rope_scaling=None,
            moe=MoEArgs(num_experts=8, top_k=3, ffn_dim=128, num_shared_experts=2, first_dense=1),
            mla=MLAArgs(
                q_lora_rank=0, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
            ),
        ),
        "16B": _16B,
        "236B": replace(
            _16B, dim=5120, n_layers=60, n_heads=128, n_kv_heads=128, ffn_dim=12288,
            moe=MoEArgs(
                num_experts=160, top_k=6, ffn_dim=1536, num_shared_experts=2, route_scale=16.0,
                num_expert_groups=8, num_limited_groups=3, first_dense=1,
            ),
            mla=MLAArgs(
                q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
        ),
    }
}  # fmt: skip
