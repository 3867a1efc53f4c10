"""Families of models whose shape is near that of Llama, and small ones of them as transformers makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from toolkit.models.common.decoder import Decoder
from toolkit.weights.safetensors import SafetensorsFolder


@dataclass(frozen=True)
class Family:
    """A family as transformers and trl have it.

    Attributes:
        theirs: how the names of transformers' classes begin.
        config: the same of its config's class, if that is another.
        classifies: whether it has a class with a classification head.
        parameters: the counts that the model cards tell by ``model.flavor``, a tied head once.
        template: trl's copy of its chat template, if it has one.
        options: of its small model, beside those of all.
        active: the counts of parameters that compute a token, by ``model.flavor``, if it has experts.
    """

    theirs: str
    parameters: Mapping[str, int]
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    active: Mapping[str, int] = field(default_factory=dict)
    config: str | None = None
    classifies: bool = True


_MLA: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 24, "q_lora_rank": None,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    # A window that is shorter than all texts but those of a few tokens.
    "mistral0.1": Family("Mistral", {"7B": 7_241_732_096}, options={"sliding_window": 13}),
    "mistral-nemo": Family(
        "Mistral", {"12B": 12_247_782_400}, options={"sliding_window": None, "head_dim": 32}
    ),
    "qwen2.5": Family(
        "Qwen2",
        {
            "0.5B": 494_032_768,
            "1.5B": 1_543_714_304,
            "3B": 3_085_938_688,
            "7B": 7_615_616_512,
            "14B": 14_770_033_664,
            "32B": 32_763_876_352,
            "72B": 72_706_203_648,
        },
        "qwen2_5",
    ),
    "qwen3": Family(
        "Qwen3",
        {
            "0.6B": 596_049_920,
            "1.7B": 1_720_574_976,
            "4B": 4_022_468_096,
            "8B": 8_190_735_360,
            "14B": 14_768_307_200,
            "32B": 32_762_123_264,
        },
        "qwen3",
        {"head_dim": 32},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        {"30B-A3B": 30_532_122_624, "235B-A22B": 235_093_634_560},
        options={
            "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
            "norm_topk_prob": True, "mlp_only_layers": [0],
        },
        active={"30B-A3B": 3_353_032_704, "235B-A22B": 22_190_763_520},
    ),
    "mixtral": Family(
        "Mixtral",
        {"8x7B": 46_702_792_704, "8x22B": 140_620_634_112},
        options={"num_local_experts": 8},
        active={"8x7B": 12_879_925_248, "8x22B": 39_152_031_744},
    ),
    "deepseek_v3": Family(
        "DeepseekV3", {"671B": 671_026_404_352},
        options=_MLA | {"q_lora_rank": 28, "n_group": 4, "topk_group": 2},
        active={"671B": 37_552_282_624},
    ),
    # The norms of latent vectors have an epsilon of their own.
    "moonlight": Family(
        "DeepseekV3", {"16B-A3B": 15_960_108_544}, options=_MLA | {"rms_norm_eps": 1e-2},
        active={"16B-A3B": 2_914_774_528},
    ),
    "deepseek_v2": Family(
        "DeepseekV2", {"16B": 15_706_484_224, "236B": 235_741_434_880}, options=_MLA,
        active={"16B": 2_661_150_208, "236B": 21_375_800_320},
    ),
    # Five heads of queries for each of keys and values; a window shorter than most texts.
    "gpt_oss": Family(
        "GptOss", {"20B": 20_914_757_184, "120B": 116_829_156_672}, "gptoss",
        options={
            "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 13,
            "num_attention_heads": 10, "intermediate_size": 40, "rope_parameters": None,
        },
        active={"20B": 4_187_440_704, "120B": 5_711_982_912},
    ),
    # Chunks and steps of the temperature that are shorter than most texts; every other block has experts.
    "llama4": Family(
        "Llama4", {"17B-16E": 107_769_861_120, "17B-128E": 400_711_848_960},
        options={
            "num_local_experts": 8, "head_dim": 32, "attention_chunk_size": 13, "floor_scale": 20,
            "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "num_hidden_layers": 4,
            "no_rope_layer_interval": 2, "rope_parameters": _LLAMA3_ROPE,
        },
        active={"17B-16E": 17_172_894_720, "17B-128E": 17_184_691_200},
        config="Llama4Text", classifies=False,
    ),
    # As the larger one is: queries and keys are not normalized. The choice of several experts is ours alone.
    "llama4-maverick": Family(
        "Llama4", {},
        options={
            "num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "attention_chunk_size": 64,
            "use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layers": [0, 0, 0],
        },
        config="Llama4Text", classifies=False,
    ),
    # The form of the largest DeepSeek-V2: groups, scaled weights and latent queries.
    "deepseek_v2-grouped": Family(
        "DeepseekV2", {},
        options=_MLA | {
            "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 3.0, "rope_parameters": _YARN,
        },
    ),
}  # fmt: skip
"""By ``model.name``."""
RELEASES = {"mistral0.2": {"7B": 7_241_732_096}, "mistral0.3": {"7B": 7_248_023_552}}
"""The counts of releases that differ from one of ``FAMILIES`` in their sizes alone."""


def save_transformers(
    folder: Path, name: str, *, tied: bool = False, kind: str = "CausalLM", vocab: int = 307
) -> Any:
    """A small model of the family ``name`` with random weights, as transformers leaves it on disk."""
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family.config or family.theirs}Config")(
        **dict(
            vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            tie_word_embeddings=tied, num_labels=3, attn_implementation="eager",
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ) | family.options,
    )  # fmt: skip
    if kind != "CausalLM":  # which finds the end of a text by it
        config.pad_token_id = 0
    model = getattr(transformers, f"{family.theirs}For{kind}")(config)
    for name, tensor in model.state_dict().items():  # transformers' own are too small to tell much
        torch.nn.init.normal_(tensor, mean=float("norm" in name), std=0.15)
    model.save_pretrained(folder)
    return model.eval()


def published(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' ``tensors`` of ``model`` by the names in files, where each expert has its own."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(tensors))


def read(folder: Path) -> Decoder:
    """The model in ``folder``, in this process alone."""
    source = SafetensorsFolder(folder)
    model = Decoder(source.args)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(source.read(name))
    return model
