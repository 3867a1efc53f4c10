"""The time of a step of any config on CPU ranks."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from toolkit.build import build_model
from toolkit.config import Config
from toolkit.cpu.memory import keep_freed_memory
from toolkit.data.batch_size import batch_shape
from toolkit.distributed.process_group import DTYPES
from toolkit.models.common.args import ModelArgs
from toolkit.optim.optimizer import build_optimizer
from toolkit.parallel.dims import degrees
from toolkit.parallel.mesh import build_mesh
from toolkit.train_step import TrainStep


def step_seconds(config: Config, args: ModelArgs, *, warm_up: int, steps: int) -> float:
    """The median seconds of ``steps`` on random tokens, in a rank of one thread; all ranks call."""
    dims = degrees(config.parallelism, dist.get_world_size())
    assert dims, "the ranks are a mesh of the config"
    keep_freed_memory()  # as the trainer does
    training = config.training
    device, dtype = torch.device("cpu"), DTYPES[training.mixed_precision_param]
    parts = build_model(config, args, build_mesh(device, **asdict(dims)), device, param_dtype=dtype, seed=0)
    optimizer = build_optimizer([*parts.named_parameters(), *parts.tied_copies()], config)
    step = TrainStep(parts, optimizer, max_norm=training.max_norm, device=device)
    batch = batch_shape(training, dp=dims.dp)
    assert batch, "the batch divides"
    seconds = []
    for _ in range(warm_up + steps):
        tokens = torch.randint(args.vocab_size, (batch.local, training.seq_len))
        samples = {"tokens": tokens, "labels": tokens.roll(-1, 1), "positions": None, "documents": None}
        dist.barrier()
        started = time.perf_counter()
        step([dict(samples) for _ in range(batch.accumulation)], learning_rate=1e-3)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warm_up:])
