"""Presets of the published Qwen2.5 base models (from config.json at Hugging Face). Imports no torch.

The Instruct models have norm_eps 1e-6 and a context of 32,768 at every size.
"""

from __future__ import annotations

from toolkit.models.common.args import ModelArgs


def _size(
    dim: int,
    n_layers: int,
    n_heads: int,
    kv_heads: int,
    ffn_dim: int,
    *,
    vocab: int = 152064,
    eps: float = 1e-5,
    context: int = 131072,
    tied: bool = False,
) -> ModelArgs:
    return ModelArgs(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab,
        head_dim=dim // n_heads,
        norm_eps=eps,
        rope_theta=1e6,
        max_seq_len=context,
        tie_embeddings=tied,
        qkv_bias=True,
        family="qwen2",
    )


PRESETS = {
    "qwen2.5": {
        "debugmodel": _size(256, 6, 4, 2, 768, vocab=2048, eps=1e-6, context=32768, tied=True),
        "0.5B": _size(896, 24, 14, 2, 4864, vocab=151936, eps=1e-6, context=32768, tied=True),
        "1.5B": _size(1536, 28, 12, 2, 8960, vocab=151936, eps=1e-6, tied=True),
        "3B": _size(2048, 36, 16, 2, 11008, vocab=151936, eps=1e-6, context=32768, tied=True),
        "7B": _size(3584, 28, 28, 4, 18944, eps=1e-6),
        "14B": _size(5120, 48, 40, 8, 13824),
        "32B": _size(5120, 64, 40, 8, 27648),
        "72B": _size(8192, 80, 64, 8, 29568),
    }
}
