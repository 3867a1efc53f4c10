"""Small runs on the embedded corpus, for tests that train."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from toolkit.config import Config
from toolkit.config.schema import config_class
from toolkit.data.build import open_data
from toolkit.health.watch import health_hooks
from toolkit.metrics.startup_timer import StartupTimer
from toolkit.trainer import Trainer

_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "ffn_dim": 160},
    "training": {
        "dataset": "embedded_validation",
        "seq_len": 64,
        "global_batch_size": 16,
        "local_batch_size": 8,
        "mixed_precision_param": "float32",
    },
    "activation_checkpoint": {"mode": "none"},
    "optimizer": {"lr": 3e-3},
    "lr_scheduler": {"warmup_steps": 5},
    "metrics": {"log_freq": 1, "enable_tensorboard": False},
}

MESHES: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    },
}
"""Tables of ``parallelism`` by name, for two ranks."""


def small_config(folder: str | Path, **tables: dict[str, Any]) -> Config:
    """A config of a tiny model that writes into ``folder``, with ``tables`` laid over it."""
    values = {table: {**_DEFAULTS.get(table, {}), **tables.get(table, {})} for table in {*_DEFAULTS, *tables}}
    values.setdefault("job", {})["dump_folder"] = str(folder)
    values.setdefault("data", {}).setdefault("cache_folder", str(Path(folder).parent / "cache"))
    return config_class().model_validate(values)


def small_trainer(config: Config) -> Trainer:
    """A trainer on the CPU of this rank, in the group that is there."""
    phases = StartupTimer(enabled=False)
    trainer = Trainer(config, open_data(config, progress=False), torch.device("cpu"), phases)
    trainer.hooks += health_hooks(trainer)
    return trainer


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 of all parameters, gathered: the same on every rank and mesh that holds the same weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
