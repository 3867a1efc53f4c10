"""What Hugging Face calls the tensors of a Llama, and in which order it keeps the rows of q and k. No torch.

RoPE turns pairs of rows of a head. Meta's (and our) pairs are neighbours, 2p and 2p + 1; Hugging Face's
are half a head apart, p and p + E/2, E being the head dim. Within each head of wq and wk, and only there,
the rows are in another order.
"""

from __future__ import annotations

from collections.abc import Sequence

_IN_BLOCK = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTSIDE = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_FROM_BLOCK = {theirs: ours for ours, theirs in _IN_BLOCK.items()}
_FROM_OUTSIDE = {theirs: ours for ours, theirs in _OUTSIDE.items()}


def to_hf(name: str) -> str:
    """Hugging Face's name of our parameter ``name``.

    Raises:
        KeyError: no parameter of a Llama is called so.
    """
    module = name.removesuffix(".weight")
    if not module.startswith("layers."):
        return f"{_OUTSIDE[module]}.weight"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{_IN_BLOCK[part]}.weight"


def from_hf(name: str) -> str | None:
    """Our name of Hugging Face's tensor ``name``; None for what is no weight (rotary frequencies).

    A name that Hugging Face gives to no tensor of a Llama is marked, to be reported as one too many.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return None
    module, _, kind = name.rpartition(".")
    if kind == "weight" and module in _FROM_OUTSIDE:
        return f"{_FROM_OUTSIDE[module]}.weight"
    parts = module.split(".", 3)
    if kind == "weight" and parts[:2] == ["model", "layers"] and parts[-1] in _FROM_BLOCK:
        return f"layers.{parts[2]}.{_FROM_BLOCK[parts[3]]}.weight"
    # Marked, since it might be one of our names: norm.weight, of a model saved without its head.
    return f"{name} (not of a Llama)"


def reorders_rows(name: str) -> bool:
    """Whether Hugging Face keeps the rows of our parameter ``name`` in another order."""
    return name.endswith(("attention.wq.weight", "attention.wk.weight"))


def hf_row_order(rows: Sequence[int], head_dim: int) -> list[int]:
    """For each of Hugging Face's ``rows`` of q_proj or k_proj, the row of ours that holds it."""
    half = head_dim // 2
    return [row - row % head_dim + row % head_dim % half * 2 + row % head_dim // half for row in rows]
