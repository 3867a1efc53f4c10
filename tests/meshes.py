"""The layouts whose gradients are those of one process, as data: each a line of words.

A word is what it sets in the configuration (``WORDS``). A line's numbers of ranks multiply to its world; what
it leaves out is plain: fp64, packed documents, an untied head, one micro-batch a step. Adding a layout is a
line of ``FAST``, which CI runs, or of ``MORE``; adding a technique is a line of ``WORDS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest
import torch

from toolkit.parallel.dims import STRATEGIES
from toolkit.parallel.pipeline_schedules import SCHEDULES

Settings = dict[str, Any]
"""Values by dotted key."""

_DEGREES = {
    "pp": "parallelism.pipeline_parallel_degree",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "cp": "parallelism.context_parallel_degree",
    "tp": "parallelism.tensor_parallel_degree",
}
DIMENSIONS = tuple(_DEGREES)
_DEGREE = re.compile(rf"({'|'.join(_DEGREES)})(\d+)")

_RESHARD = "parallelism.fsdp_reshard_after_forward"
_BLOCKS = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"]
_HEAD = ["norm", "output"]


def _precision(stored: str, computed: str, reduced: str) -> Settings:
    return {
        "training.dtype": stored,
        "training.mixed_precision_param": computed,
        "training.mixed_precision_reduce": reduced,
    }


def _adapter(kind: str, **options: Any) -> Settings:
    return {"finetune.adapter": kind, **{f"finetune.{key}": value for key, value in options.items()}}


def _classification(trainable: tuple[str, ...] | list[str] = (), **options: Any) -> Settings:
    table = {f"finetune.classification.{key}": value for key, value in options.items()}
    return {**table, "finetune.trainable": list(trainable)}


_ALL_LINEAR = {"lora.rank": 3, "lora.target_modules": ["all-linear"]}

# A row, or what tp2 leaves of one, is whole blocks of 64 numbers in 4 bits.
_IN_BLOCKS = {"model.dim": 128, "model.ffn_dim": 256}

# Scales are those of a micro-batch: all layouts have micro-batches of one size.
_FLOAT8 = {
    "model.converters": ["float8"],
    "quantize.linear.float8.emulate": True,
    "model.ffn_dim": 64,
    "training.local_batch_size": 6,
    "parallelism.pipeline_parallel_microbatch_size": 6,
    "validation.local_batch_size": 1,
}

PAIR_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}.{% endgeneration %}"
    "{% else %}{{ message.content }}?{% endif %}{% endfor %}"
)

PLAIN: Settings = {
    **_precision("float64", "float64", "float64"),
    "model.dim": 32,
    "model.n_layers": 4,
    "model.n_heads": 8,
    "model.n_kv_heads": 4,
    # Divide by tp, and their parts by no number of shards: FSDP cuts unevenly.
    "model.ffn_dim": 44,
    "model.vocab_size": 516,
    "training.seq_len": 32,
    "training.loss_chunk_tokens": 100,
    "training.max_norm": 0.5,  # below the norm of the first steps: clipping is part of what is compared
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}

WORDS: dict[str, Settings] = {
    "one": {},
    **{name: {"parallelism.pipeline_parallel_schedule": name} for name in SCHEDULES},
    **{name: {"parallelism.sharding_strategy": name} for name in STRATEGIES},
    "never": {_RESHARD: "never"},
    "always": {_RESHARD: "always"},
    "over2": {_RESHARD: 2},
    "accumulate3": {},
    # Sums in an order that the ranks do not change; the fused kernel rounds by the size of a shard.
    "bitwise": {"debug.bitwise_data_parallel": True, "optimizer.implementation": "foreach"},
    "tied": {"model.tie_embeddings": True},
    "unmasked": {"data.document_mask": False},
    "layers8": {"model.n_layers": 8},
    # Heads of another size than dim / n_heads, their queries and keys normalised.
    "qwen3": {
        "model.name": "qwen3",
        "model.flavor": "debugmodel",
        "model.head_dim": 6,
        "model.tie_embeddings": False,
    },
    # A window of half a row, which is shorter than many a document.
    "mistral": {"model.name": "mistral0.1", "model.flavor": "debugmodel"},
    # Biases of queries, keys and values.
    "qwen2": {"model.name": "qwen2.5", "model.flavor": "debugmodel", "model.tie_embeddings": False},
    # A block with a parameter, a buffer, a loss and a statistic of its own, from a module of the tests.
    "gated": {"model.name": "gated", "model.flavor": "debugmodel"},
    # Experts after a dense block, with biases, from a module of the tests; ep divides the ranks of a line.
    "moe": {"model.name": "experts", "model.flavor": "debugmodel"},
    # Latent attention, and experts of which one is shared, in groups.
    "mla": {"model.name": "deepseek_v3", "model.flavor": "debugmodel", "model.n_kv_heads": 8},
    # Queries that are not made from a latent vector, and scores that are a softmax.
    "mla2": {"model.name": "deepseek_v2", "model.flavor": "debugmodel", "model.n_kv_heads": 8},
    # Sinks, biases of everything, and a window of half a row in every other block.
    "gpt_oss": {"model.name": "gpt_oss", "model.flavor": "debugmodel", "model.ffn_dim": None},
    # Chunks of half a row; every other block has experts, and every fourth neither RoPE nor chunks.
    "llama4": {"model.name": "llama4", "model.flavor": "debugmodel"},
    "moe-wide": {"model.name": "experts", "model.flavor": "wide"},
    **{f"ep{size}": {"parallelism.expert_parallel_degree": size} for size in (2, 4, 8)},
    **{f"etp{size}": {"parallelism.expert_tensor_parallel_degree": size} for size in (2, 4)},
    "aux": {"moe.aux_loss_coeff": 0.1, "moe.z_loss_coeff": 0.01},
    "aux-seq": {"moe.aux_loss_coeff": 0.1, "moe.aux_loss_scope": "sequence"},
    # What is sent to each rank is then known before the run.
    "balanced": {"debug.moe_force_load_balance": True},
    "regularized": {"loss.label_smoothing": 0.1, "loss.z_loss": 0.01},
    "AC-full": {"activation_checkpoint.mode": "full"},
    "AC-2": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "2"},
    "AC-op": {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
    "AC-matmul": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "matmul",
    },
    "early": {"activation_checkpoint.early_stop": True},
    "compiled": {"compile.enable": True, "compile.backend": "aot_eager"},
    "inductor": {"compile.backend": "inductor"},
    "budget": {"activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": 0.2},
    # Units within units: attention and feed-forward, or feed-forward alone.
    "by-class": {
        "parallelism.fsdp_wrap_policy": "class",
        "parallelism.fsdp_wrap_classes": ["TransformerBlock", "Attention", "FeedForward"],
    },
    "by-size": {"parallelism.fsdp_wrap_policy": "size", "parallelism.fsdp_min_num_params": 4_000},
    "prefetch": {"parallelism.fsdp_forward_prefetch": 2, "parallelism.fsdp_backward_prefetch": 2},
    "reduce-once": {"parallelism.fsdp_sync_each_batch": False},
    "whole-logits": {"parallelism.disable_loss_parallel": True},
    "keep-gathered": {"parallelism.tensor_parallel_recompute_allgather": False},
    "head-first": {"parallelism.context_parallel_load_balancer": None},
    "ring": {"parallelism.context_parallel_rotate_method": "alltoall"},
    "light-ends": {
        "parallelism.pipeline_parallel_first_stage_less_layers": 1,
        "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    },
    # With two stages on each of two ranks, or one on each of four: the embedding alone, and the head alone.
    "bare-ends": {
        "parallelism.pipeline_parallel_first_stage_less_layers": 2,
        "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    },
    "bare-embedding": {"parallelism.module_fqns_per_model_part": [_BLOCKS[:1], [*_BLOCKS[1:], *_HEAD]]},
    "bare-head": {"parallelism.module_fqns_per_model_part": [_BLOCKS, _HEAD]},
    "by-hand": {"parallelism.module_fqns_per_model_part": [_BLOCKS[:2], [*_BLOCKS[2:], *_HEAD]]},
    "stage-a-layer": {"parallelism.pipeline_parallel_layers_per_stage": 1},
    # Rows, or what tp2 leaves of them, are whole blocks of 256 numbers.
    "adamw-8bit": {
        "optimizer.name": "AdamW8bit",
        "model.dim": 256,
        "model.n_layers": 1,
        "model.head_dim": 64,
        "model.ffn_dim": 512,
    },
    "muon": {"optimizer.name": "Muon"},
    # Rates and decays by name, and rates by depth.
    "groups": {
        "optimizer.groups": {
            "slow": {"params": ["tok_embeddings.*", "*.wo.weight"], "lr": 3e-4},
            "some": {"params": ["*norm.weight", "layers.0.*"], "weight_decay": 0.3},
        },
        "optimizer.layer_lr_decay": 0.8,
    },
    # Some of what Muon and AdamW8bit would update in their own way.
    "by-adamw": {"optimizer.groups": {"plain": {"params": ["*.wo.weight", "*.w2.*"], "name": "AdamW"}}},
    "ema": {"optimizer.ema_decay": 0.5},
    "distill": {"distillation.enable": True, "distillation.temperature": 2.0, "distillation.top_k": 20},
    "reverse": {"distillation.divergence": "reverse_kl"},
    # Much noise, so that another one shows.
    "neftune": {"finetune.neftune_noise_alpha": 50.0},
    "loraplus": {"optimizer.loraplus_lr_ratio": 16.0},
    "lora": _adapter("lora", **_ALL_LINEAR),
    "dora": _adapter("lora", **_ALL_LINEAR, **{"lora.use_dora": True}),
    "router": {"finetune.lora.target_modules": ["all-linear", "gate"]},
    # Rows of the embedding are trained beside it: BOS, two letters, and a token that occurs in no text.
    "token-rows": {"finetune.trainable_token_indices": [256, 101, 32, 515]},
    # Embedding and head too.
    "outer": {"finetune.lora.target_modules": ["all-linear", "embed_tokens", "lm_head"]},
    # The embedding is trained beside it.
    "rslora": _adapter("lora", **{"lora.use_rslora": True, "trainable": ["tok_embeddings.weight"]}),
    "qlora": {**_adapter("lora", **_ALL_LINEAR, **{"lora.quantize_base": "nf4"}), **_IN_BLOCKS},
    "qdora": {
        **_adapter("lora", **_ALL_LINEAR, **{"lora.quantize_base": "nf4", "lora.use_dora": True}),
        **_IN_BLOCKS,
    },
    "prefix": _adapter("prefix_tuning", **{"prefix_tuning.num_virtual_tokens": 5}),
    "llama-adapter": _adapter(
        "llama_adapter", **{"llama_adapter.adapter_len": 3, "llama_adapter.adapter_layers": 3}
    ),
    "llama-adapter-peft": _adapter(
        "llama_adapter", **{"llama_adapter.gate": "layer", "llama_adapter.adapter_layers": 4}
    ),
    "weighted": {"data.format": "messages", "data.chat_template": PAIR_TEMPLATE, "data.empty_mask": "drop"},
    "dpo": {
        **_adapter("lora", **_ALL_LINEAR),
        "finetune.objective": "dpo",
        "finetune.dpo.label_smoothing": 0.1,
        "data.format": "preference",
        "data.chat_template": PAIR_TEMPLATE,
    },
    "kto": {
        **_adapter("lora", **_ALL_LINEAR),
        "finetune.objective": "kto",
        "finetune.kto.desirable_weight": 1.3,
        "data.format": "unpaired_preference",
        "data.chat_template": PAIR_TEMPLATE,
    },
    "reward": {
        "finetune.objective": "reward",
        "finetune.reward.center_rewards_coefficient": 0.02,
        "data.format": "preference",
        "data.chat_template": PAIR_TEMPLATE,
    },
    # All parameters are trained: the reference is stored, or there is none.
    "whole": {"finetune.adapter": "none"},
    **{
        name: {
            "finetune.objective": name,
            "data.format": "preference",
            "data.chat_template": PAIR_TEMPLATE,
        }
        for name in ("cpo", "simpo", "orpo")
    },
    "ipo": {"finetune.dpo.loss_type": "ipo", "finetune.dpo.label_smoothing": 0.0},
    "freeze-first": {"finetune.freeze_first_layers": 2},
    "freeze-last": {"finetune.freeze_last_layers": 1, "finetune.frozen": ["output.weight"]},
    "norms-only": {"finetune.trainable": ["*norm.weight"]},
    "biases-only": {"finetune.trainable": ["*.bias"]},
    "classification": _classification(num_labels=3),
    # On a backbone that is not trained, and beside an adapter.
    "class-head": _classification(num_labels=5, hidden_sizes=[20, 12], trainable=["output.*"]),
    "class-lora": {**_adapter("lora", **_ALL_LINEAR), **_classification(num_labels=2)},
    "float8": _FLOAT8,
    "micro3": {"training.local_batch_size": 3},
    "gathered": {"quantize.linear.float8.enable_fsdp_float8_all_gather": True},
    "precomputed": {"quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": True},
    **{
        f"float8-{name}": {**_FLOAT8, "quantize.linear.float8.recipe_name": name}
        for name in ("rowwise", "rowwise_with_gw_hp")
    },
    "float32": _precision("float32", "float32", "float32"),
    "bfloat16": _precision("float32", "bfloat16", "float32"),
}

FINETUNED = (
    "dpo",
    "kto",
    "reward",
    "cpo",
    "simpo",
    "orpo",
    "lora",
    "dora",
    "rslora",
    "qlora",
    "qdora",
    "prefix",
    "llama-adapter",
    "llama-adapter-peft",
    "freeze-first",
    "freeze-last",
    "norms-only",
    "classification",
    "class-head",
    "class-lora",
)
FLOAT8 = ("float8", "float8-rowwise", "float8-rowwise_with_gw_hp")
CURVES = (
    *FINETUNED,
    *FLOAT8,
    "ipo",
    "whole",
    "biases-only",
    "adamw-8bit",
    "muon",
    "groups",
    "by-adamw",
    "loraplus",
    "token-rows",
    "ema",
    "neftune",
    "distill",
    "reverse",
    "regularized",
    "weighted",
    "qwen3",
    "qwen2",
    "mistral",
    "gated",
    "moe",
    "mla",
    "mla2",
    "gpt_oss",
    "llama4",
    "moe-wide",
    "router",
    "outer",
    "aux",
    "aux-seq",
    "balanced",
    "tied",
    "unmasked",
    "layers8",
    "float32",
    "bfloat16",
)
"""Words that are part of what is trained: a layout is compared with one process of the same ones, in this
order, in which the later change what the earlier set."""

SAMPLES = 24
"""Samples of a global batch: divides by every data-parallel degree up to 8 with three micro-batches each."""


def settings(layout: str, plain: Settings | None = None) -> Settings:
    """Settings of the configuration for a layout, those of ``plain`` before its words. Raises KeyError for a
    word that is none."""
    values = {**PLAIN, **(plain or {})}
    for word in layout.split():
        degree = _DEGREE.fullmatch(word)
        values |= {_DEGREES[degree[1]]: int(degree[2])} if degree else WORDS[word]
    return values


def degrees(layout: str) -> dict[str, int]:
    """The sizes that a layout names."""
    found = (_DEGREE.fullmatch(word) for word in layout.split())
    return {degree[1]: int(degree[2]) for degree in found if degree}


def ranks(layout: str) -> int:
    return math.prod(degrees(layout).values())


def accumulation(layout: str) -> int:
    return 3 if "accumulate3" in layout.split() else 1


def reference(layout: str) -> str:
    """One process that trains the same."""
    return " ".join(["one", *(word for word in CURVES if word in layout.split())])


def precision(layout: str) -> str:
    return next((word for word in ("float32", "bfloat16") if word in layout.split()), "float64")


def techniques(layout: str) -> set[str]:
    """Its words without numbers of ranks."""
    return degrees(layout).keys() | {word for word in layout.split() if word in WORDS}


def has_known_traffic(layout: str) -> bool:
    """Return whether the configuration determines what is sent; how many rows experts get is not known."""
    words = layout.split()
    return "balanced" in words or not any(word.startswith("ep") for word in words)


def every_second(layouts: Iterable[str]) -> list[Any]:
    """The layouts as parameters of a test, of which every other one runs with ``-m exhaustive`` alone."""
    return [
        pytest.param(layout, marks=pytest.mark.exhaustive if place % 2 else (), id=layout)
        for place, layout in enumerate(layouts)
    ]


def pairs(layouts: Iterable[str]) -> set[frozenset[str]]:
    """Each two techniques that some layout has together."""
    return {frozenset(pair) for layout in layouts for pair in combinations(techniques(layout), 2)}


FAST = [
    # One dimension.
    "shard2 SHARD_GRAD_OP tied accumulate3",
    "shard2 by-class AC-2",
    "replicate2 NO_SHARD accumulate3 by-size",
    "tp2 AC-full",
    "cp2 tied AC-op",
    "cp2 accumulate3 head-first",
    "pp2 GPipe accumulate3",
    "pp2 1F1B tied AC-full",
    "pp2 LoopedBFS tied AC-op",
    "pp2 InterleavedZeroBubble never",
    "pp2 ZBVZeroBubble never tied accumulate3",
    "pp2 DualPipeV never",
    # Stages without blocks.
    "pp2 Interleaved1F1B bare-ends tied accumulate3",
    "pp4 1F1B bare-ends tied",
    # Strategies in fp32, which gloo reduces another way; the others are in MORE.
    "shard4 FULL_SHARD float32 accumulate3",
    "replicate2 shard2 HYBRID_SHARD_ZERO2 float32",
    "replicate2 shard2 HYBRID_SHARD float32",
    # Two dimensions.
    "pp2 shard2 ZBVZeroBubble SHARD_GRAD_OP",
    # Three dimensions.
    "shard2 cp2 tp2 tied accumulate3 AC-full",
    "pp2 cp2 tp2 ZBVZeroBubble never tied",
    # Other families.
    "tp2 qwen3 accumulate3",
    "pp2 shard2 tp2 Interleaved1F1B qwen3 tied",
    "pp2 1F1B qwen2 tied",
    "cp2 ring mistral",
    "shard2 gated accumulate3",
    "tp2 gated AC-full",
    "pp2 ZBVZeroBubble gated",
    # The same bits.
    "shard2 bitwise accumulate3",
    "replicate2 shard2 bitwise accumulate3",
    # Experts.
    "shard2 ep2 moe aux accumulate3",
    "shard2 ep2 moe aux tied balanced AC-op",
    "shard2 ep2 moe aux compiled AC-op",
    "shard2 tp2 ep2 etp2 moe aux balanced",
    "tp2 moe aux AC-op",
    "tp2 ep2 moe aux-seq",
    "cp2 ep2 moe aux-seq AC-full",
    "pp2 1F1B moe aux tied",
    "replicate2 shard2 ep2 moe aux",
    "pp2 shard2 Interleaved1F1B ep2 moe aux",
    # Latent attention.
    "tp2 mla aux AC-full",
    "shard2 ep2 mla aux balanced",
    # Sinks and biases.
    "tp2 gpt_oss aux AC-full",
    "shard2 ep2 gpt_oss aux AC-op",
    # Chunks, and scores before experts.
    "tp2 ep2 llama4 aux AC-full",
    "shard2 cp2 llama4 aux AC-op",
    # Another optimizer.
    "shard2 tp2 adamw-8bit tied",
    "shard2 tp2 muon tied",
    "pp2 tp2 1F1B groups tied",
    "shard2 groups muon",
    "shard2 tp2 muon by-adamw tied",
    "shard2 tp2 ep2 moe muon balanced",
    "shard2 tp2 ema",
    "pp2 1F1B ema tied accumulate3",
    # Noise.
    "shard2 tp2 distill accumulate3",
    "pp2 cp2 1F1B distill reverse tied",
    "shard2 tp2 neftune accumulate3",
    "pp2 cp2 Interleaved1F1B neftune tied",
    # Another loss.
    "pp2 cp2 1F1B regularized tied accumulate3",
    # Weights of tokens.
    "pp2 cp2 1F1B weighted tied",
]
"""Layouts that CI runs."""

MORE = [
    # Techniques that a layout of FAST has in another combination.
    "tp2 keep-gathered",
    "cp2 ring tied AC-2",
    "pp2 GPipe bare-head tied",
    "pp2 InterleavedZeroBubble bare-ends",
    "pp2 ZBVZeroBubble bare-ends tied",
    "shard4 SHARD_GRAD_OP float32",
    "replicate4 NO_SHARD float32 accumulate3",
    "pp2 replicate2 DualPipeV never tied",
    "replicate2 shard2 tp2 HYBRID_SHARD",
    "cp2 mistral tied",
    "pp2 1F1B gated tied",
    "cp2 gated tied AC-op accumulate3",
    "shard2 tp2 regularized",
    "shard2 tp2 weighted accumulate3",
    "pp2 1F1B always by-class AC-op",
    "pp2 1F1B bare-embedding muon",  # a rank without matrices
    "tp2 tied accumulate3 whole-logits",
    # The same bits.
    "shard4 bitwise AC-op accumulate3",
    "shard2 cp2 bitwise tied",
    "shard2 tp2 bitwise AC-full",
    "pp2 shard2 1F1B bitwise",
    "pp2 replicate2 Interleaved1F1B bitwise tied",
    "replicate2 NO_SHARD bitwise muon",
    # Experts.
    "shard2 moe aux by-class AC-2",
    "shard4 moe aux-seq accumulate3 reduce-once",
    "shard2 moe aux compiled",
    "tp2 moe aux-seq compiled",
    "tp2 moe aux compiled AC-full",
    "cp2 moe aux",
    "cp2 moe aux-seq head-first",
    "replicate2 NO_SHARD moe aux",
    "pp2 ZBVZeroBubble never moe aux",
    "pp2 GPipe moe aux-seq AC-full accumulate3",
    "shard2 ep2 moe aux muon",
    "shard2 ep2 moe aux adamw-8bit",
    "shard2 ep2 moe aux float32",
    "shard2 ep2 moe aux bfloat16 AC-op",
    "shard2 ep2 moe aux by-size prefetch",
    "shard4 ep2 moe aux SHARD_GRAD_OP accumulate3 reduce-once",
    "shard4 ep4 moe aux tied AC-full",
    "shard4 ep2 moe balanced accumulate3",
    "replicate2 shard4 ep2 moe aux HYBRID_SHARD accumulate3",
    "replicate2 shard2 ep2 moe aux-seq HYBRID_SHARD_ZERO2 tied",
    "pp2 shard2 1F1B ep2 moe aux balanced",
    "shard2 tp2 ep2 moe aux",
    "shard2 tp2 ep4 moe aux-seq tied AC-op",
    "tp4 ep4 moe aux accumulate3",
    "tp4 ep2 moe aux",  # FSDP shards experts alone
    "replicate2 tp2 ep2 moe aux NO_SHARD",
    "shard2 cp2 ep2 moe aux-seq",
    "shard2 cp2 ep4 moe aux AC-2 accumulate3",
    "cp4 ep2 moe aux-seq tied",
    "cp2 ring ep2 moe aux",
    "cp2 tp2 ep4 moe aux-seq balanced",
    "pp2 shard2 1F1B ep2 moe aux accumulate3",
    "pp2 tp2 GPipe ep2 moe aux-seq tied AC-full",
    "pp2 cp2 1F1B ep2 moe aux-seq",
    "pp2 shard2 tp2 Interleaved1F1B ep4 moe aux",
    "pp2 shard2 ZBVZeroBubble never ep2 moe aux tied",
    "shard8 ep8 moe aux",
    # Experts split by tp too.
    "shard2 tp2 ep2 etp2 moe aux-seq accumulate3 AC-full",
    "shard2 tp2 ep2 etp2 moe aux compiled AC-op accumulate3",
    "shard2 tp2 ep2 etp2 moe muon balanced",
    "cp2 tp2 ep2 etp2 gpt_oss aux",
    "cp2 tp2 ep2 etp2 mla aux compiled AC-full",
    "shard2 tp4 ep2 etp4 moe aux",
    "shard4 tp2 ep2 etp2 moe aux-seq tied",
    "shard2 cp2 tp2 ep4 etp2 moe aux balanced",
    "replicate2 shard2 tp2 ep2 etp2 moe aux HYBRID_SHARD",
    "pp2 shard2 tp2 1F1B ep2 etp2 moe balanced",
    "pp2 shard2 tp2 ZBVZeroBubble never ep2 etp2 moe aux",
    # Compiled in parts.
    "shard2 ep2 moe aux compiled accumulate3",
    "shard2 ep2 moe aux compiled AC-full",
    "shard2 ep2 moe aux compiled AC-2 reduce-once",
    "tp2 ep2 moe aux-seq compiled",
    "tp2 ep2 moe aux-seq compiled AC-full accumulate3",
    "cp2 ep2 gpt_oss aux compiled AC-op",
    "shard2 ep2 mla aux compiled AC-full",
    "shard2 tp2 ep4 moe aux compiled AC-op accumulate3",
    "pp2 shard2 1F1B ep2 moe aux compiled AC-full",
    "pp2 shard2 ZBVZeroBubble never ep2 moe aux compiled",
    "pp2 shard2 InterleavedZeroBubble never ep2 moe compiled AC-op",
    "shard8 ep4 moe aux-seq AC-full",
    "shard2 cp2 tp2 ep8 moe aux",
    # Latent attention.
    "shard2 mla aux AC-op accumulate3",
    "replicate2 shard2 HYBRID_SHARD mla2 aux",
    "tp2 mla2 aux-seq tied",
    "tp2 mla keep-gathered accumulate3",
    "tp2 mla2 compiled",
    "shard2 mla compiled AC-full",
    "tp2 mla lora",
    "shard2 ep2 mla lora",
    "shard2 by-class mla AC-2",
    "cp2 mla aux",
    "cp2 ring mla2",
    "cp2 tp2 mla aux tied",
    "shard2 cp2 tp2 mla2 AC-op",
    "tp2 ep2 mla aux",
    "cp2 tp2 ep4 mla2 aux-seq",
    "pp2 1F1B mla aux",
    "pp2 ZBVZeroBubble never mla",
    "pp2 tp2 Interleaved1F1B mla2 aux tied",
    "pp2 shard2 tp2 1F1B ep4 mla aux",
    "shard2 tp2 mla muon",
    "shard2 tp2 mla float32",
    "shard2 mla2 bfloat16",
    # Sinks and biases.
    "shard4 gpt_oss aux accumulate3",
    "replicate2 shard2 HYBRID_SHARD gpt_oss aux-seq",
    "tp2 gpt_oss aux tied keep-gathered",
    "tp2 ep2 gpt_oss aux",
    "pp2 1F1B gpt_oss aux AC-full",
    "pp2 ZBVZeroBubble never gpt_oss tied",
    "cp2 gpt_oss aux-seq tied",
    "tp2 gpt_oss compiled",
    "shard2 gpt_oss compiled AC-full",
    "shard2 gpt_oss float32 AC-op",
    # Chunks, and scores before experts.
    "shard2 llama4 aux accumulate3",
    "tp2 llama4 aux-seq tied",
    "cp2 llama4 unmasked",
    "cp2 ring llama4 aux",
    "cp2 ring llama4 unmasked AC-full",
    "pp2 1F1B llama4 aux",
    "pp2 ZBVZeroBubble never llama4 tied",
    "shard2 ep2 llama4 aux AC-op",
    "shard2 tp2 ep2 llama4 aux",
    "tp2 llama4 compiled",
    "shard2 llama4 compiled AC-full",
    "shard2 llama4 float32 AC-op",
    # Other families.
    "shard2 cp2 tp2 qwen3 AC-full",
    "shard2 cp2 tp2 gated tied AC-op accumulate3",
    "shard4 qwen2 AC-op",
    "tp2 mistral accumulate3",
    "pp2 1F1B mistral tied",
    "tp2 qwen2 accumulate3",
    "shard4 qwen3 AC-op",
    "replicate2 shard2 qwen3",
    "cp2 qwen3 tied",
    "pp2 1F1B qwen3 tied",
    "replicate2 shard2 qwen2",
    "cp2 qwen2 tied",
    "shard4 mistral AC-op",
    "replicate2 shard2 mistral",
    "shard2 cp2 tp2 qwen2 AC-full",
    "pp2 shard2 tp2 Interleaved1F1B qwen2 tied",
    "shard2 cp2 tp2 mistral AC-full",
    "pp2 shard2 tp2 Interleaved1F1B mistral tied",
    "shard2 tp2 regularized compiled",
    "pp2 shard2 tp2 Interleaved1F1B gated AC-full accumulate3",
    "replicate2 shard2 gated compiled",
    "tp2 gated compiled AC-full",
    "pp2 cp2 InterleavedZeroBubble gated",
    "shard2 gated bfloat16",
    # Weights of tokens.
    "tp2 weighted",
    "replicate2 shard2 weighted AC-full",
    "shard2 tp2 weighted whole-logits tied",
    "shard2 cp2 tp2 weighted regularized accumulate3",
    "pp2 ZBVZeroBubble weighted",
    "pp2 tp2 Interleaved1F1B weighted bare-ends",
    "shard2 weighted compiled",
    "cp2 weighted unmasked",
    "shard2 weighted bfloat16",
    # One dimension, at more ranks.
    "shard4 over2 AC-full compiled",
    "shard8 accumulate3 prefetch reduce-once FULL_SHARD",
    "shard4 always tied reduce-once accumulate3",
    "replicate4 tied",
    "replicate8 NO_SHARD AC-op by-class prefetch",
    "tp4",
    "tp4 tied whole-logits AC-2 accumulate3",
    "cp4",
    "cp4 tied head-first AC-full",
    "cp8 accumulate3 unmasked reduce-once AC-full",
    "tp2 AC-full early",
    "tp2 unmasked",
    "cp2 unmasked",
    "cp2 unmasked head-first tied compiled",
    "pp2 unmasked tied 1F1B",
    "cp2 unmasked ring",
    "cp4 unmasked ring tied head-first accumulate3",
    "cp2 tp2 unmasked ring AC-full",
    "cp2 tp2 compiled AC-matmul",
    "pp2 cp2 unmasked ring 1F1B",
    "shard2 cp2 tp2 unmasked ring",
    "cp4 ring tied accumulate3",
    "cp4 ring head-first AC-op",
    "cp2 tp2 ring",
    "pp2 cp2 ring ZBVZeroBubble tied",
    "pp2 cp2 tp2 ring Interleaved1F1B bare-ends",
    "shard2 cp2 ring AC-full accumulate3 reduce-once",
    "cp2 compiled ring tied",
    "cp2 ring bfloat16",
    # Every schedule at other depths, with other cuts.
    "pp4 GPipe tied never",
    "pp4 1F1B accumulate3",
    "pp8 1F1B layers8 tied",
    "pp2 Interleaved1F1B layers8 stage-a-layer tied AC-full never",
    "pp2 LoopedBFS layers8 stage-a-layer accumulate3 never by-size",
    "pp4 Interleaved1F1B layers8 by-class prefetch",
    "pp4 LoopedBFS layers8 tied",
    "pp4 InterleavedZeroBubble layers8 never tied accumulate3",
    "pp2 InterleavedZeroBubble layers8 stage-a-layer never tied",
    "pp2 shard2 InterleavedZeroBubble layers8 stage-a-layer SHARD_GRAD_OP AC-2",
    "pp4 ZBVZeroBubble layers8 never unmasked by-class",
    "pp4 DualPipeV layers8 never tied by-size",
    "pp2 1F1B light-ends",
    "pp2 GPipe by-hand tied",
    "pp4 1F1B light-ends layers8",
    # Stages without blocks, in every schedule.
    "pp2 1F1B bare-embedding AC-full",
    "pp2 1F1B bare-head never",
    "pp2 GPipe bare-embedding tied by-size",
    "pp4 GPipe bare-ends AC-2",
    "pp2 LoopedBFS bare-ends tied by-class",
    "pp2 DualPipeV bare-ends accumulate3",
    "pp2 DualPipeV bare-ends tied AC-full",
    "pp2 ZBVZeroBubble bare-ends AC-2",
    "pp2 InterleavedZeroBubble bare-ends tied AC-full",
    "pp4 ZBVZeroBubble layers8 bare-ends never tied",
    "pp2 Interleaved1F1B light-ends stage-a-layer AC-op",
    "pp2 InterleavedZeroBubble light-ends stage-a-layer tied",
    "pp4 Interleaved1F1B layers8 bare-ends unmasked",
    "pp2 shard2 Interleaved1F1B bare-ends FULL_SHARD tied",
    "pp2 shard2 DualPipeV bare-ends SHARD_GRAD_OP tied",
    "pp2 tp2 Interleaved1F1B bare-ends tied accumulate3",
    "pp2 tp2 ZBVZeroBubble bare-ends whole-logits",
    "pp4 tp2 1F1B bare-ends tied",
    "pp2 cp2 InterleavedZeroBubble bare-ends tied",
    "pp2 cp2 LoopedBFS bare-ends head-first",
    "pp2 replicate2 shard2 1F1B bare-head HYBRID_SHARD tied",
    "pp2 shard2 tp2 ZBVZeroBubble bare-ends tied",
    "pp2 cp2 tp2 Interleaved1F1B bare-ends AC-full",
    "pp2 compiled Interleaved1F1B bare-ends tied",
    "pp2 compiled DualPipeV bare-ends",
    "pp4 1F1B float32 bare-ends tied",
    "pp2 Interleaved1F1B bfloat16 bare-ends",
    # Every strategy in a pipeline.
    "pp2 shard2 GPipe FULL_SHARD",
    "pp2 shard2 GPipe SHARD_GRAD_OP tied",
    "pp2 shard2 1F1B SHARD_GRAD_OP",
    "pp2 shard2 Interleaved1F1B SHARD_GRAD_OP accumulate3",
    "pp2 replicate2 1F1B NO_SHARD",
    "pp2 replicate2 shard2 GPipe HYBRID_SHARD",
    "pp2 replicate2 shard2 GPipe HYBRID_SHARD_ZERO2 tied",
    "pp2 replicate2 shard2 1F1B HYBRID_SHARD_ZERO2 AC-op",
    "pp2 replicate2 shard2 Interleaved1F1B HYBRID_SHARD_ZERO2",
    "pp2 replicate2 shard2 LoopedBFS HYBRID_SHARD tied",
    "pp2 replicate2 shard2 LoopedBFS HYBRID_SHARD_ZERO2",
    # Zero bubbles with each way of keeping parameters, the default among them.
    "pp2 InterleavedZeroBubble",
    "pp2 ZBVZeroBubble tied",
    "pp2 shard2 DualPipeV",
    "pp2 shard2 InterleavedZeroBubble SHARD_GRAD_OP tied AC-2",
    "pp2 shard2 DualPipeV SHARD_GRAD_OP accumulate3 unmasked",
    "pp2 replicate2 shard2 InterleavedZeroBubble HYBRID_SHARD_ZERO2 prefetch unmasked",
    "pp2 replicate2 shard2 ZBVZeroBubble HYBRID_SHARD_ZERO2 tied AC-2 by-size",
    "pp2 replicate2 shard2 DualPipeV HYBRID_SHARD_ZERO2 AC-full by-class",
    "pp2 replicate2 InterleavedZeroBubble never AC-full unmasked by-size",
    # Two dimensions.
    "shard2 tp2 accumulate3",
    "shard2 cp2 tied",
    "cp2 tp2 AC-2 tied",
    "pp2 tp2 1F1B tied accumulate3",
    "pp2 cp2 Interleaved1F1B",
    "replicate2 shard2 HYBRID_SHARD AC-full accumulate3 by-class",
    "replicate2 shard2 HYBRID_SHARD_ZERO2 tied accumulate3 reduce-once",
    "replicate2 shard4 over2 HYBRID_SHARD AC-2 unmasked",
    "replicate4 shard2 by-class tied accumulate3 reduce-once",
    "replicate2 cp2",
    "replicate2 cp4 tied accumulate3 NO_SHARD reduce-once",
    "replicate2 tp2 NO_SHARD whole-logits AC-full compiled",
    "replicate4 tp2 tied AC-op accumulate3 reduce-once",
    "shard4 over2 reduce-once accumulate3",
    "shard4 never reduce-once accumulate3 by-size tied AC-op",
    "tp2 reduce-once accumulate3 whole-logits",
    "shard4 cp2 FULL_SHARD by-size over2 head-first",
    "shard2 cp4 AC-2 FULL_SHARD unmasked",
    "shard4 over2 AC-op FULL_SHARD tied",
    "shard4 tp2 AC-op whole-logits FULL_SHARD",
    "shard2 tp4 FULL_SHARD tied accumulate3",
    "shard2 tp4 SHARD_GRAD_OP whole-logits by-size prefetch",
    "cp4 tp2 tied",
    "cp2 tp4 head-first accumulate3 reduce-once AC-2",
    "cp2 tp4 tied AC-op",
    "shard4 over2 unmasked by-class prefetch",
    "pp2 shard4 GPipe unmasked by-class prefetch",
    "pp2 shard4 1F1B always tied accumulate3",
    "pp4 shard2 1F1B tied by-class FULL_SHARD AC-2",
    "pp2 shard2 1F1B tied FULL_SHARD AC-op",
    "pp2 replicate2 GPipe NO_SHARD",
    "pp2 replicate4 LoopedBFS",
    "pp4 replicate2 Interleaved1F1B layers8 tied NO_SHARD unmasked AC-2",
    "pp2 tp4 1F1B whole-logits",
    "pp2 tp4 DualPipeV never tied whole-logits",
    "pp4 tp2 GPipe tied AC-full whole-logits",
    "pp4 tp2 ZBVZeroBubble layers8 never prefetch whole-logits",
    "pp2 tp2 InterleavedZeroBubble never tied",
    "pp2 tp2 InterleavedZeroBubble never AC-full early",
    "pp2 tp2 LoopedBFS whole-logits AC-2 unmasked",
    "pp2 tp2 Interleaved1F1B light-ends layers8 by-size",
    "pp2 cp4 1F1B tied head-first",
    "pp2 cp2 GPipe head-first AC-op by-size",
    "pp4 cp2 LoopedBFS layers8",
    "pp2 cp2 InterleavedZeroBubble never accumulate3",
    "pp2 cp2 DualPipeV never tied AC-2 prefetch",
    "pp2 cp2 ZBVZeroBubble never head-first",
    # Every three of the five dimensions.
    "pp2 shard2 cp2 1F1B",
    "pp2 replicate2 shard2 Interleaved1F1B HYBRID_SHARD accumulate3",
    "pp2 shard2 tp2 Interleaved1F1B accumulate3",
    "replicate2 shard2 cp2 HYBRID_SHARD AC-op head-first",
    "replicate2 shard2 cp2 HYBRID_SHARD_ZERO2 tied accumulate3 compiled",
    "replicate2 shard2 cp2 HYBRID_SHARD_ZERO2 head-first",
    "replicate2 shard2 tp2 HYBRID_SHARD whole-logits",
    "replicate2 shard2 tp2 HYBRID_SHARD_ZERO2 tied accumulate3 whole-logits",
    "replicate2 cp2 tp2 NO_SHARD",
    "replicate2 cp2 tp2 tied head-first AC-op prefetch",
    "shard2 cp2 tp2 SHARD_GRAD_OP AC-op",
    "shard2 cp2 tp2 unmasked AC-op",
    "pp2 replicate2 shard2 1F1B HYBRID_SHARD tied by-size prefetch",
    "pp2 replicate2 cp2 LoopedBFS tied NO_SHARD head-first",
    "pp2 replicate2 cp2 ZBVZeroBubble never AC-full",
    "pp2 replicate2 tp2 GPipe",
    "pp2 replicate2 tp2 InterleavedZeroBubble never tied",
    "pp2 shard2 cp2 Interleaved1F1B tied accumulate3 FULL_SHARD head-first",
    "pp2 shard2 cp2 DualPipeV SHARD_GRAD_OP head-first",
    "pp2 shard2 tp2 LoopedBFS tied AC-full SHARD_GRAD_OP by-class",
    "pp2 shard2 tp2 ZBVZeroBubble never accumulate3",
    "pp2 cp2 tp2 GPipe tied accumulate3",
    "pp2 cp2 tp2 1F1B AC-2",
    "pp2 cp2 tp2 Interleaved1F1B tied AC-op whole-logits",
    "pp2 cp2 tp2 LoopedBFS whole-logits",
    "pp2 cp2 tp2 InterleavedZeroBubble never head-first by-class whole-logits",
    "pp2 cp2 tp2 DualPipeV never accumulate3",
    "pp2 cp2 tp2 unmasked 1F1B tied",
    # Every four of the five, and all five.
    "replicate2 shard2 cp2 tp2 HYBRID_SHARD tied accumulate3",
    "pp2 replicate2 shard2 cp2 1F1B tied",
    "pp2 replicate2 shard2 tp2 Interleaved1F1B accumulate3",
    "pp2 replicate2 cp2 tp2 LoopedBFS tied",
    "pp2 shard2 cp2 tp2 ZBVZeroBubble never tied",
    "pp2 shard2 cp2 tp2 1F1B accumulate3 AC-full",
    "replicate2 shard2 cp2 tp2 HYBRID_SHARD_ZERO2 whole-logits AC-op",
    "pp2 replicate2 shard2 cp2 DualPipeV never",
    "pp2 replicate2 shard2 tp2 GPipe HYBRID_SHARD",
    "pp2 replicate2 cp2 tp2 InterleavedZeroBubble never tied",
    "pp2 shard2 cp2 tp2 Interleaved1F1B tied accumulate3",
    "pp2 replicate2 shard2 cp2 tp2 1F1B tied",
    # Compiled.
    "shard2 compiled",
    "tp2 compiled tied accumulate3",
    "cp2 compiled tied",
    "pp2 compiled 1F1B tied never",
    "shard2 tp2 compiled AC-full",
    "shard2 cp2 compiled SHARD_GRAD_OP accumulate3 reduce-once",
    "cp2 tp2 compiled AC-op",
    "pp2 tp2 compiled Interleaved1F1B",
    "pp2 cp2 compiled GPipe AC-2",
    "pp2 shard2 compiled LoopedBFS AC-full FULL_SHARD prefetch",
    "replicate2 shard2 compiled HYBRID_SHARD accumulate3 reduce-once",
    "pp2 compiled InterleavedZeroBubble AC-op",
    "pp2 shard2 compiled ZBVZeroBubble tied",
    "pp2 tp2 compiled DualPipeV",
    "pp2 cp2 tp2 compiled 1F1B",
    # In fp32, and computed in bf16.
    "tp2 float32 tied",
    "cp2 float32",
    "pp2 1F1B float32 tied",
    "pp2 shard2 tp2 ZBVZeroBubble never float32",
    "shard2 cp2 tp2 float32 accumulate3",
    "shard2 bfloat16",
    "tp2 bfloat16",
    "cp2 bfloat16 tied",
    "pp2 1F1B bfloat16",
    "pp2 shard2 tp2 Interleaved1F1B bfloat16 accumulate3",
    "pp2 cp2 tp2 ZBVZeroBubble never bfloat16 tied",
    # Other families.
    "shard2 cp2 tp2 qwen3 compiled AC-full",
    "shard2 cp2 tp2 qwen2 compiled AC-full",
    "shard2 cp2 tp2 mistral compiled AC-full",
    "cp4 mistral unmasked",
    "cp4 ring head-first mistral unmasked",
    "pp2 ZBVZeroBubble never mistral",
    "shard2 tp2 qwen2 by-class",
    "pp2 tp2 InterleavedZeroBubble never AC-full qwen2",
    "pp2 ZBVZeroBubble never qwen2",
    # Another optimizer.
    "replicate2 shard2 muon",
    "shard2 compiled muon",
    "shard2 cp2 muon tied",
    "shard2 qwen3 muon",
    "replicate2 shard2 tp2 HYBRID_SHARD_ZERO2 muon",
    "pp2 tp2 Interleaved1F1B layers8 muon",
    "pp2 replicate2 shard2 ZBVZeroBubble never muon",
    "pp4 GPipe bare-ends muon",
    *(
        f"{mesh} distill"
        for mesh in (
            "replicate2 shard2 HYBRID_SHARD",
            "replicate2 shard2 tp2 AC-full",
            "cp2 tp2 tied",
            "pp2 tp2 1F1B accumulate3",
            "pp2 Interleaved1F1B reverse lora",
            "pp2 ZBVZeroBubble never",
            "shard2 ep2 moe aux balanced",
            "shard2 ep2 moe aux accumulate3",
            "pp2 1F1B moe aux",
            "shard2 weighted accumulate3",
            "shard2 compiled reverse",
            "shard2 bitwise accumulate3",
        )
    ),
    *(
        f"{mesh} neftune"
        for mesh in (
            "replicate2 shard2 tied AC-full",
            "shard2 cp2 head-first",
            "cp2 tp2 tied accumulate3",
            "pp2 DualPipeV never accumulate3",
            "pp2 ZBVZeroBubble never unmasked",
            "pp2 tp2 1F1B",
            "shard2 ep2 moe aux accumulate3",
            "shard2 bitwise accumulate3",
        )
    ),
    *(
        f"{mesh} ema"
        for mesh in (
            "shard4 SHARD_GRAD_OP tied",
            "replicate2 NO_SHARD",
            "replicate2 shard2 HYBRID_SHARD",
            "cp2 tied",
            "pp2 DualPipeV never tied",
            "shard2 muon",
            "shard2 ep2 moe aux",
            "shard2 bfloat16",
        )
    ),
    *(f"{mesh} groups" for mesh in ("shard4", "replicate2 shard2 HYBRID_SHARD", "tp2 tied", "cp2")),
    "pp2 ZBVZeroBubble never groups",
    "shard2 groups adamw-8bit",
    *(f"{mesh} by-adamw" for mesh in ("pp2 1F1B adamw-8bit", "shard4 muon", "tp2 adamw-8bit tied")),
    *(f"{mesh} muon by-adamw" for mesh in ("replicate2 shard2 HYBRID_SHARD", "cp2", "pp2 tp2 1F1B")),
    "shard2 ep2 moe groups",
    "shard4 moe muon",
    "tp2 moe muon",
    "shard2 tp2 moe muon accumulate3",
    "tp4 ep2 moe muon",
    "replicate2 shard2 ep2 moe muon HYBRID_SHARD",
    "pp2 shard2 1F1B ep2 moe muon balanced",
    "cp2 ep2 gpt_oss muon",
    "shard8 ep2 mla muon",
]
"""Layouts that only the full list runs."""

LAYOUTS = FAST + MORE

FINETUNED_FAST = [
    "shard2 lora AC-full accumulate3",
    "tp2 lora tied",
    "cp2 lora mistral",
    "pp2 1F1B lora",
    "tp2 qlora AC-op tied",
    "tp2 qdora",
    "shard2 prefix AC-2",
    "cp2 prefix",
    "tp2 llama-adapter",
    "cp2 llama-adapter-peft AC-full",
    "pp2 1F1B freeze-first tied",
    "tp2 norms-only",
    "pp2 tp2 1F1B rslora tied",
    "shard2 classification AC-full accumulate3",
    "cp2 class-lora AC-op",
    "pp2 1F1B class-head",
    "shard2 freeze-last weighted accumulate3",
    "shard2 dpo AC-full accumulate3",
    "pp2 tp2 1F1B dpo",
    "shard2 simpo accumulate3",
    "cp2 orpo tied",
    "shard2 kto accumulate3",
    "pp2 tp2 1F1B kto whole",
    "cp2 tp2 reward",
    "shard2 lora outer accumulate3",
    "tp2 lora outer compiled",
    "pp2 ZBVZeroBubble never lora outer",
    "cp2 dpo outer AC-full",
    "shard2 ep2 moe lora router aux accumulate3",
    "tp2 moe lora balanced AC-op",
    "shard2 ep2 moe-wide qlora AC-full",
    "shard2 lora token-rows accumulate3",
    "tp2 lora tied token-rows",
    "pp2 1F1B lora token-rows",
    "shard2 cp2 dpo tied token-rows",
]
"""Layouts of fine-tuning that CI runs."""

FINETUNED_MORE = [
    f"{mesh} {word}"
    for word in FINETUNED
    for mesh in (
        "one compiled",
        "shard2 compiled",
        "shard2 compiled budget",
        "shard4 AC-op",
        "replicate2 shard2 accumulate3 reduce-once",
        "tp2 AC-2 compiled",
        "cp2 head-first",
        "pp2 Interleaved1F1B AC-full",
        "pp2 ZBVZeroBubble",
        "shard2 cp2 tp2 AC-full",
        "pp2 shard2 tp2 1F1B",
        "shard2 by-class never",
    )
] + [
    "tp2 qlora mla2",
    "tp2 lora qwen2",
    "shard2 qlora AC-full",
    "cp2 qdora",
    "replicate2 shard2 qlora",
    "tp2 prefix",
    "tp2 class-head",
    "cp2 dpo",
    "shard2 compiled budget lora",
    "pp2 1F1B qlora accumulate3",
    *(f"{mesh} lora qwen3" for mesh in ("shard2", "tp2", "pp2 1F1B")),
    *(f"{mesh} qwen2" for mesh in ("shard2 lora", "pp2 1F1B dora", "tp2 qdora", "tp2 llama-adapter")),
    *(f"{mesh} biases-only qwen2" for mesh in ("tp2", "shard2 cp2 AC-full", "pp2 1F1B")),
    *(f"{mesh} dpo ipo" for mesh in ("cp2 tp2", "pp2 cp2 Interleaved1F1B", "shard2 cp2", "tp2 whole-logits")),
    "pp2 tp2 Interleaved1F1B classification",
    "shard2 tp2 freeze-last",
    "tp2 dpo",
    "tp2 kto",
    *(
        f"{mesh} lora outer"
        for mesh in (
            "one compiled",
            "shard2 compiled",
            "replicate2 shard2 HYBRID_SHARD AC-full",
            "shard2 by-class always",
            "tp2 whole-logits accumulate3",
            "cp2",
            "pp2 1F1B bare-ends",
            "pp2 tp2 Interleaved1F1B",
            "shard2 neftune",
            "shard2 distill accumulate3",
            "shard2 loraplus groups",
        )
    ),
    "tp2 qlora outer",
    "shard2 ep2 moe lora outer",
    *(
        f"{mesh} dpo whole"
        for mesh in ("shard2 accumulate3", "cp2", "tp2 tied", "pp2 1F1B", "replicate2 shard2")
    ),
    *(f"{mesh} kto whole" for mesh in ("shard2", "cp2", "tp2 tied", "pp2 1F1B")),
    "shard2 dpo ipo whole",
    *(
        f"{mesh} reward"
        for mesh in ("shard2 accumulate3", "tp2 AC-full", "cp2", "pp2 1F1B", "replicate2 shard2")
    ),
    "shard2 reward lora",
    "pp2 tp2 1F1B kto",
    "cp2 kto AC-full",
    "replicate2 shard2 kto HYBRID_SHARD",
    "pp2 1F1B kto",
    "shard2 ep2 moe kto",
    "replicate2 shard2 dora",
    "replicate2 shard2 class-lora",
    "tp2 dora",
    "cp2 dora AC-op",
    "replicate2 shard2 dpo",
    "cp2 dpo prefix",
    "shard2 dpo llama-adapter prefetch",
    "pp2 1F1B dpo",
    "shard2 compiled inductor qlora",
    # What is before the first trained parameter is computed forward alone.
    *(f"shard2 {how} freeze-first" for how in ("by-class AC-full", "prefetch", "reduce-once accumulate3")),
    *(f"pp2 shard2 {how} freeze-first" for how in ("GPipe FULL_SHARD", "1F1B FULL_SHARD", "ZBVZeroBubble")),
    "tp2 AC-2 freeze-first",
    "cp2 ring AC-op freeze-first",
    "shard4 over2 freeze-first",
    "cp2 ring lora",
    "shard2 by-size AC-full lora",
    "shard2 by-size AC-2 class-lora",
    "shard2 accumulate3 class-head",
    "pp2 1F1B bare-ends llama-adapter",
    "pp2 tp2 ZBVZeroBubble AC-full lora",
    "pp2 tp2 InterleavedZeroBubble bare-ends AC-full dora",
    # Adapters of experts.
    *(
        f"{mesh} {word}"
        for word in ("moe lora router", "moe-wide qlora")
        for mesh in (
            "one compiled",
            "shard4 AC-full",
            "tp2 AC-full accumulate3",
            "tp2 ep2",
            "cp2 ep2",
            "shard2 tp2 AC-op",
            "shard2 tp2 ep2 accumulate3",
            "shard2 tp2 ep4 AC-full",
            "replicate2 shard2 HYBRID_SHARD",
            "replicate2 shard2 ep2 HYBRID_SHARD AC-full",
            "pp2 1F1B AC-full",
            "pp2 ZBVZeroBubble never",
            "pp2 shard2 Interleaved1F1B ep2 accumulate3",
            "pp2 tp2 GPipe ep2 AC-op",
            "shard2 by-class ep2",
            "shard2 cp2 tp2 ep4",
        )
    ),
    "shard2 ep2 moe lora tied",
    "tp4 ep2 moe lora router",
    "tp2 gpt_oss lora",
    "shard2 ep2 gpt_oss lora AC-full",
    "shard2 qlora gpt_oss",
    "tp2 llama4 lora",
    "shard2 ep2 llama4 lora AC-full",
    "shard2 qlora llama4",
    "shard2 ep2 moe dpo",
    "shard2 tp2 ep2 moe dpo AC-full",
    "shard2 compiled moe lora",
    "shard2 ep2 compiled moe lora router AC-op",
    "shard2 tp2 ep2 etp2 moe lora router AC-op",
    "shard2 tp2 ep2 etp2 moe-wide qlora",
    "shard2 ep2 compiled moe-wide qlora AC-full",
    *(f"tp2 {how} dora" for how in ("AC-op", "AC-full early")),
    "shard2 tp2 lora loraplus",
    "shard2 cp2 qlora neftune",
    "shard2 tp2 lora ema",
    "pp2 1F1B ema freeze-first tied",
    "pp2 1F1B neftune freeze-first",
    "pp2 1F1B lora loraplus",
    *(
        f"{mesh} token-rows"
        for mesh in (
            "tp4 lora",
            "tp2 compiled AC-2 lora tied whole-logits",
            "replicate2 shard2 HYBRID_SHARD lora tied",
            "shard2 tp2 AC-full lora ema tied accumulate3",
            "cp2 lora neftune",
            "pp2 ZBVZeroBubble never lora",
            "pp2 shard2 tp2 Interleaved1F1B lora",
            "tp2 dpo tied",
        )
    ),
    "shard2 muon freeze-first",
    "pp2 1F1B muon freeze-first",
]

FLOAT8_FAST = [
    "shard2 float8",
    "shard2 float8 gathered",
    "shard2 float8 gathered precomputed AC-full",
    "tp2 float8-rowwise_with_gw_hp tied",
    "cp2 float8",
    "pp2 1F1B float8",
]
"""Layouts in float8 that CI runs."""

FLOAT8_MORE = [
    "shard2 float8-rowwise AC-op",
    "tp2 float8 gathered precomputed",
    "shard2 float8-rowwise_with_gw_hp micro3",
    "shard2 float8 gathered muon",
    "shard2 float8 gathered precomputed muon",
] + [
    f"{mesh} {word}"
    for word in (*FLOAT8, "float8 gathered", "float8 gathered precomputed")
    for mesh in (
        "shard2 SHARD_GRAD_OP",
        "shard4 AC-op by-size",
        "replicate2 shard2",
        "replicate2 NO_SHARD",
        "tp2 tied AC-full",
        "cp2 ring head-first",
        "shard2 cp2 tp2",
        "pp2 Interleaved1F1B",
        "pp2 ZBVZeroBubble",
        "pp2 shard2 tp2 1F1B",
        "shard2 compiled",
        "shard2 compiled AC-op",
        "cp2 tp2 compiled AC-full",
    )
]

SINCE_2_13 = torch.__version__ >= (2, 13)
"""Before, gloo cannot send to the own rank, as V-shaped pipelines do, compiled code has no backward in
halves, and inductor no attention in fp64 on a CPU: the preflight refuses all three."""
SINCE_2_12 = torch.__version__ >= (2, 12)
"""Before, fully_shard takes no parameters of integers: the preflight refuses a base in 4 bits."""


def runs_here(layout: str) -> bool:
    """Say if torch can."""
    words = layout.split()
    schedules = [SCHEDULES[word] for word in words if word in SCHEDULES]
    v_shaped = any(schedule.v_shaped for schedule in schedules)
    halves = any(schedule.split_backward for schedule in schedules) and "compiled" in words
    in_4_bits = not {"qlora", "qdora"}.isdisjoint(words)
    return (SINCE_2_13 or not (v_shaped or halves)) and (SINCE_2_12 or not in_4_bits)


CROSSED = [
    *DIMENSIONS,
    *SCHEDULES,
    *STRATEGIES,
    *("tied", "accumulate3", "unmasked", "AC-full", "AC-2", "AC-op", "compiled", "never", "over2"),
    *("by-class", "by-size", "prefetch", "reduce-once", "whole-logits", "head-first"),
]
"""Techniques each two of which some layout has together."""

ONE_OF = [SCHEDULES, STRATEGIES, ("AC-full", "AC-2", "AC-op"), ("never", "over2"), ("by-class", "by-size")]
"""A run has one of each of these."""

_SPLIT = [name for name, schedule in SCHEDULES.items() if schedule.split_backward]
REFUSED = [
    "replicate2 FULL_SHARD",
    "replicate2 SHARD_GRAD_OP",
    "shard2 NO_SHARD",
    *(f"shard4 {name} over2" for name in ("SHARD_GRAD_OP", "NO_SHARD")),
    "replicate2 shard4 HYBRID_SHARD_ZERO2 over2",
    *(f"shard2 {name} never" for name in ("FULL_SHARD", "NO_SHARD")),
    "replicate2 shard2 HYBRID_SHARD never",
    *(f"pp2 {schedule} {name}" for schedule in _SPLIT for name in ("FULL_SHARD", "NO_SHARD")),
    *(f"pp2 replicate2 shard2 {schedule} HYBRID_SHARD" for schedule in _SPLIT),
    *(f"pp2 shard4 {schedule} over2" for schedule in SCHEDULES),
    *(f"shard4 {split} over2" for split in ("pp2", "tp2", "tp2 whole-logits")),
    *(f"pp2 never {schedule} AC-op" for schedule in _SPLIT),  # eager
    *(f"shard2 compiled {units}" for units in ("by-class", "by-size")),
]
"""Layouts whose last two words the preflight refuses together."""

IDLE = [
    *(("reduce-once", name) for name in ("pp", *SCHEDULES)),  # a pipeline always reduces once a step
    *(("never", name) for name in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")),  # is what they mean
]
"""Words of which the first adds nothing to the second."""


def never_together() -> set[frozenset[str]]:
    """Pairs that no layout can have."""
    exclusive = {frozenset(pair) for group in ONE_OF for pair in combinations(group, 2)}
    refused = {frozenset(techniques(" ".join(layout.split()[-2:]))) for layout in REFUSED}
    return exclusive | refused | set(map(frozenset, IDLE))
