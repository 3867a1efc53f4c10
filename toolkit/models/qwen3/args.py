"""Presets of the published dense Qwen3 models (from config.json at Hugging Face). Imports no torch."""

from __future__ import annotations

from toolkit.models.common.args import ModelArgs


def _size(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, *, tied: bool, kv_heads: int = 8, vocab: int = 151936
) -> ModelArgs:
    return ModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab,
        head_dim=128,
        norm_eps=1e-6,
        rope_theta=1e6,
        max_seq_len=40960,
        tie_embeddings=tied,
        qk_norm=True,
        family="qwen3",
    )


PRESETS = {
    "qwen3": {
        "debugmodel": _size(256, 6, 4, 768, tied=True, kv_heads=2, vocab=2048),
        "0.6B": _size(1024, 28, 16, 3072, tied=True),
        "1.7B": _size(2048, 28, 16, 6144, tied=True),
        "4B": _size(2560, 36, 32, 9728, tied=True),
        "8B": _size(4096, 36, 32, 12288, tied=False),
        "14B": _size(5120, 40, 40, 17408, tied=False),
        "32B": _size(5120, 64, 64, 25600, tied=False),
    }
}
