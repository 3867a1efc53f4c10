"""Qwen3, dense: a Llama that normalises each head of its queries and keys, and whose heads have 128 numbers
whatever its dim (arXiv:2505.09388)."""

from toolkit.models.common.hf_config import HFConfig
from toolkit.models.common.spec import ModelSpec
from toolkit.models.common.state_dict_adapter import StateDictAdapter
from toolkit.models.llama.state_dict_adapter import IN_BLOCK
from toolkit.models.qwen3.args import PRESETS

_NORMS = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}

SPEC = ModelSpec(
    sizes=PRESETS,
    hf_config=HFConfig(
        "qwen3", "Qwen3ForCausalLM", "a Qwen3", 32768, head_dim=128, n_kv_heads=32, qk_norm=True,
        extra={"use_sliding_window": False},
    ),
    adapter=StateDictAdapter(IN_BLOCK | _NORMS, reordered=("attention.wq", "attention.wk", *_NORMS)),
)  # fmt: skip
