"""What a run says of itself, from the configuration: its log, its speed, and what is known at its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from toolkit.config import Config
from toolkit.data.dataloader import Loader
from toolkit.metrics.flops import flops_per_token, peak_flops
from toolkit.metrics.logger import MetricLogger
from toolkit.metrics.speed import SpeedMeter
from toolkit.models.llama.args import LlamaArgs
from toolkit.optim.lr_scheduler import cut_to_fit


def open_log(config: Config, folder: Path, *, total_steps: int, resume_step: int) -> MetricLogger:
    """The log of this rank in the run's ``folder``, continued after ``resume_step``."""
    options = config.metrics
    return MetricLogger(
        folder,
        total_steps=total_steps,
        resume_step=resume_step,
        rank=dist.get_rank(),
        tensorboard=options.enable_tensorboard,
        tensorboard_folder=options.save_tb_folder,
        all_ranks=options.save_for_all_ranks,
        color=not options.disable_color_printing,
        config_text=config.to_toml(),
        wandb=options.enable_wandb,
        config=config.model_dump(),
    )


def open_speed_meter(config: Config, args: LlamaArgs, device: torch.device, dtype: torch.dtype) -> SpeedMeter:
    """The meter of the run's steps; it knows no peak of a device that is not in our table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = config.metrics.peak_tflops
    per_device = peak * 1e12 if peak else peak_flops(name, str(dtype).removeprefix("torch."))
    flops = flops_per_token(
        dim=args.dim,
        n_layers=args.n_layers,
        n_heads=args.n_heads,
        n_kv_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        ffn_dim=args.ffn_dim,
        vocab_size=args.vocab_size,
        seq_len=config.training.seq_len,
    )
    return SpeedMeter(
        flops_per_token=flops,
        peak_flops=per_device * dist.get_world_size() if per_device else None,
        mark=torch.profiler.record_function,
    )


def told_at_start(config: Config, loader: Loader, *, total_steps: int, samples: int) -> Iterator[str]:
    """What the preflight cannot know, since it needs the tokenised corpus: its length, and the
    shares of a mixture in the ``samples`` of all its steps."""
    epochs, options = config.training.epochs, config.lr_scheduler
    if epochs:
        yield f"{total_steps} steps: training.epochs {epochs}, {loader.epoch_samples:,} samples each"
        yield from cut_to_fit(
            total_steps=options.total_steps or total_steps,
            warmup_steps=options.warmup_steps,
            warmup_ratio=options.warmup_ratio,
            decay_ratio=options.decay_ratio,
        )
    if loader.mixture:
        yield loader.mixture.describe(samples)
