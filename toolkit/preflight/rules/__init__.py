"""Rules of the preflight, one file per topic; each is a function registered by ``@rule``.

A file is loaded only if one of its keys is set, because the defaults break no rule. Some files are loaded for
every run on a GPU.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from toolkit.config import Config
from toolkit.config.schema import NAME, Field, fields, named_tables

FILES: dict[str, tuple[str, ...]] = {
    "options": (),
    "schedule": (),
    "optim": (
        "optimizer.no_decay",
        "optimizer.groups",
        "optimizer.ema_decay",
        "optimizer.early_step_in_backward",
    ),
    "adamw_8bit": ("optimizer.name",),
    "muon": ("optimizer.name",),
    "memory": ("activation_checkpoint", "compile"),
    "metrics": ("metrics", "profiling"),
    "health": ("health",),
    "model": (),
    "attention": ("model.attention", "model.flavor"),
    "mesh": ("parallelism.", "training.global_batch_size"),
    "tensor_context_parallel": (
        "parallelism.tensor_parallel",
        "parallelism.context_parallel",
        "parallelism.enable_async_tensor_parallel",
        "parallelism.disable_loss_parallel",
    ),
    "bitwise": ("debug.bitwise_data_parallel",),
    "experts": ("parallelism.expert_", "parallelism.tensor_parallel"),
    "pipeline": ("parallelism.pipeline_parallel", "parallelism.module_fqns_per_model_part"),
    "fsdp": (
        "parallelism.fsdp",
        "parallelism.sharding_strategy",
        "parallelism.data_parallel",
        "training.enable_cpu_offload",
    ),
    "distillation": ("distillation",),
    "evaluation": ("evaluation",),
    "finetune": ("finetune",),
    "nf4": ("finetune.lora.quantize_base",),
    "float8": ("model.converters",),
    "classification": ("finetune.classification", "finetune.objective"),
    "data": (),
    "corpora": (
        "data.text_column",
        "data.mixture",
        "training.dataset_",
        "validation.dataset_",
        "validation.base_corpus",
    ),
    "chat": (
        "data.format",
        "data.columns",
        "data.chat_template",
        "data.train_on",
        "data.mask_empty_thinking",
        "data.empty_mask",
        "data.mixture",
        "model.additional_special_tokens",
        "training.format",
        "training.columns",
        "validation.format",
        "validation.columns",
    ),
    "mixture": ("data.mixture",),
    "phases": ("phases",),
    "streaming": ("data.streaming",),
    "saving": (
        "checkpoint.keep_every_n",
        "checkpoint.keep_best",
        "checkpoint.async_mode",
        "checkpoint.create_seed_checkpoint",
        "checkpoint.load_only",
    ),
    "checkpoint": ("checkpoint.enable",),
    "weights": (
        "checkpoint.initial_load",
        "checkpoint.last_save_in_hf",
        "checkpoint.hf_export_interval",
        "checkpoint.push_to_hub",
    ),
}
"""File → prefixes of its keys; empty if it applies to every run. The order is that of reported problems: the
requested options, the model, the hardware, the data."""


OFF = {"activation_checkpoint.mode": "none", "model.flavor": "debugmodel"}
"""Values other than the default that no rule needs to check."""
ON_GPU = ("attention",)
"""Files for every run on a GPU, where "auto" selects options that do not exist on a CPU."""


def load(config: Config, device: str) -> list[ModuleType]:
    """Import the files of rules that apply to ``config`` on ``device``, "cuda" or "cpu"."""
    groups = [table.removesuffix(f".{NAME}") for table in named_tables()]
    changed = [group for group in groups if config.knows(group) and config.value(group)]
    changed += [field.key for field in fields() if NAME not in field.key and _differs(config, field)]
    return [
        importlib.import_module(f"{__name__}.{file}")
        for file, keys in FILES.items()
        if not keys or any(key.startswith(keys) for key in changed) or (device != "cpu" and file in ON_GPU)
    ]


def _differs(config: Config, field: Field) -> bool:
    if not config.knows(field.key):
        return False
    return config.value(field.key) not in (field.default, OFF.get(field.key, field.default))
