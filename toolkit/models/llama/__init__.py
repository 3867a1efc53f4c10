"""Llama 2, 3, 3.1, 3.2 and 3.3."""

from toolkit.models.common.hf_config import HFConfig
from toolkit.models.common.spec import ModelSpec
from toolkit.models.llama.args import PRESETS, ffn_rule
from toolkit.models.llama.state_dict_adapter import ADAPTER

SPEC = ModelSpec(
    sizes=PRESETS,
    ffn_rule=ffn_rule,
    hf_config=HFConfig(
        "llama", "LlamaForCausalLM", "a Llama", 2048, extra={"mlp_bias": False, "pretraining_tp": 1}
    ),
    adapter=ADAPTER,
    has_meta_files=True,
)
