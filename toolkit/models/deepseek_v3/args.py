"""Presets of DeepSeek-V3 and Moonlight (from config.json at Hugging Face). Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.common.args import MLAArgs, ModelArgs, MoEArgs, YarnScaling

_671B = ModelArgs(
    dim=7168,
    n_layers=61,
    n_heads=128,
    n_kv_heads=128,
    ffn_dim=18432,
    vocab_size=129280,
    head_dim=192,
    norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=YarnScaling(40.0, 4096, attention_factor=1.0, mscale_all_dim=1.0),
    max_seq_len=163840,
    family="deepseek_v3",
    moe=MoEArgs(
        num_experts=256, top_k=8, ffn_dim=2048, num_shared_experts=1, score_func="sigmoid", route_norm=True,
        route_scale=2.5, expert_bias=True, num_expert_groups=8, num_limited_groups=4, first_dense=3,
    ),
    mla=MLAArgs(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
)  # fmt: skip
_DEBUG_EXPERTS = MoEArgs(
    num_experts=8, top_k=3, ffn_dim=128, num_shared_experts=1, score_func="sigmoid", route_norm=True,
    route_scale=2.5, expert_bias=True, num_expert_groups=4, num_limited_groups=2, first_dense=1,
)  # fmt: skip
_DEBUG_LATENT = MLAArgs(
    q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
)
_DEBUG = replace(
    _671B, dim=256, n_layers=6, n_heads=4, n_kv_heads=4, ffn_dim=768, vocab_size=2048, head_dim=96,
    max_seq_len=4096, rope_scaling=None,
    moe=_DEBUG_EXPERTS, mla=_DEBUG_LATENT,
)  # fmt: skip

PRESETS = {
    "deepseek_v3": {"debugmodel": _DEBUG, "671B": _671B},
    "moonlight": {
        "debugmodel": replace(
            _DEBUG, moe=replace(_DEBUG_EXPERTS, num_expert_groups=0, num_limited_groups=0),
            mla=replace(_DEBUG_LATENT, q_lora_rank=0),
        ),
        "16B-A3B": replace(
            _671B, dim=2048, n_layers=27, n_heads=16, n_kv_heads=16, ffn_dim=11264, vocab_size=163840,
            norm_eps=1e-5, rope_theta=50000.0, rope_scaling=None, max_seq_len=8192,
            moe=MoEArgs(
                num_experts=64, top_k=6, ffn_dim=1408, num_shared_experts=2, score_func="sigmoid",
                route_norm=True, route_scale=2.446, expert_bias=True, first_dense=1,
            ),
            mla=MLAArgs(
                q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
            ),
        ),
    },
}  # fmt: skip
