"""Hugging Face's names of the tensors of a Llama. Imports no torch."""

from __future__ import annotations

from toolkit.models.common.state_dict_adapter import StateDictAdapter

IN_BLOCK = {
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
ADAPTER = StateDictAdapter(IN_BLOCK, reordered=("attention.wq", "attention.wk"))
