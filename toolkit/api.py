"""The public Python API, for notebooks, scripts and other trainers.

Each function takes the configuration of a run and uses the same weights, batches, batch order and learning
rates as ``run_train.sh``. docs/python.md has a training loop of 26 lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from toolkit import preflight
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpointer import run_metadata
from toolkit.config import Config
from toolkit.config import load_config as load_arguments
from toolkit.config.finetune import Finetune
from toolkit.config.local_paths import expand_user
from toolkit.config.training import Loss
from toolkit.config.values import format_toml
from toolkit.data import build, build_loader
from toolkit.data.batch_size import batch_shape
from toolkit.data.dataloader import Batch
from toolkit.data.run_data import RunData
from toolkit.distributed import process_group
from toolkit.distributed.agreement import Ranks
from toolkit.distributed.dtensor import clean_name
from toolkit.errors import ConfigError, DataError, Problem
from toolkit.generation.load import LoadedModel
from toolkit.generation.load import load_model as load_sharded
from toolkit.generation.sampling import Sampling
from toolkit.hardware import detect
from toolkit.health.watch import health_hooks
from toolkit.launcher.environment import rank_environment
from toolkit.metrics.startup_timer import StartupTimer
from toolkit.models.common.decoder import Decoder
from toolkit.models.from_config import attention_name, model_args
from toolkit.models.meta_decoder import meta_decoder
from toolkit.models.parameters import init_rule
from toolkit.optim.lr_scheduler import learning_rate as scheduled_rate
from toolkit.optim.optimizer import build_optimizer as build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.init_weights import initialize
from toolkit.parallel.objective import count_valid
from toolkit.run_phases import train_in_phases
from toolkit.step_hooks import StepHook
from toolkit.trainer import Trainer
from toolkit.weights.export import export_hf as export_folder
from toolkit.weights.load import load_weights as load_source
from toolkit.weights.open import open_weights

_PLAIN: dict[str, Any] = {
    "finetune": Finetune(),
    "optimizer.ema_decay": None,
    "loss": Loss(),
    "distillation.enable": False,
    "model.converters": [],
    "training.epochs": None,
    "phases": {},
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.context_parallel_degree": 1,
    "parallelism.pipeline_parallel_degree": 1,
}
"""Values that :func:`new_model` requires: the preset's unmodified model, with data parallelism only."""


def load_config(file: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Load a TOML file, with overrides by key, such as ``{"training.steps": 10}``.

    Raises:
        ConfigError: the file or values are invalid; lists every problem.
    """
    values = {"job.config_file": str(file), **(overrides or {})}
    texts = {key: it if isinstance(it, str) else format_toml(it) for key, it in values.items()}
    return load_arguments([f"--{key}={text}" for key, text in texts.items()])


@contextmanager
def start(config: Config) -> Iterator[torch.device]:
    """Join the process group and yield this rank's device.

    The ranks are those that torchrun started, or this process alone. The group is destroyed at the end,
    unless an error is raised, because other ranks may still be waiting in it. An existing group is kept.

    Raises:
        ConfigError: the preflight finds problems for this number of ranks, or the configuration requests a
            dry run.
    """
    if config.is_dry:
        rule = "a dry run trains nothing, and is made by the command line"
        raise ConfigError(Problem(rule, "remove it, or use run_train.sh", "comm.mode", config.comm.mode))
    world_size = rank_environment(os.environ).world_size
    hardware = detect(config.training.device)
    if problems := preflight.check(config, world_size=world_size, hardware=hardware):
        raise ConfigError(problems)
    on_cpu = config.training.device == "cpu"
    device = torch.device("cpu") if on_cpu else process_group.local_device(hardware.device)
    joins = not dist.is_initialized()
    if joins:
        process_group.start(device, timeout_seconds=config.comm.init_timeout_seconds)
    yield device
    if joins:
        process_group.stop()


def run(config: Config, hooks: Sequence[StepHook] = ()) -> list[dict[str, Any]]:
    """Train to the last step, resuming from the newest checkpoint, and return the values of each logged step.

    ``hooks`` are called around each step, after the hooks of ``[health]``.

    Raises:
        ConfigError: the configuration is invalid, or sets ``health.straggler_factor`` on GPUs, where only
            ``run_train.sh`` records the timings that it needs.
        DataError, CheckpointError, TrainingError: as on the command line.
    """
    with start(config) as device:
        if (factor := config.health.straggler_factor) is not None and device.type == "cuda":
            rule = "on GPUs it needs NCCL's records, which only the command line starts"
            raise ConfigError(
                Problem(rule, "remove it, or use run_train.sh", "health.straggler_factor", factor)
            )
        data = open_data(config)

        def build(**options: Any) -> Trainer:
            trainer = Trainer(config, data, device, StartupTimer(enabled=False), **options)
            trainer.hooks += [*health_hooks(trainer), *hooks]
            return trainer

        _, trainer = train_in_phases(config, build)
    return trainer.history


def open_data(config: Config) -> RunData:
    """Open the tokenizer and the token caches of all corpora; tokenize corpora without a cache.

    Raises:
        DataError: a corpus or the tokenizer is missing, empty or unreadable.
    """
    return build.open_data(config, progress=False)


class GlobalBatches:
    """The global batches of a data-parallel run, in the order in which the run trains on them.

    Each step yields this rank's micro-batches and the number of tokens with a loss, over all ranks. A
    micro-batch has int64 ``tokens`` and ``labels`` (B, S). The labels are already shifted, and −100 where a
    token has no loss. ``positions`` and ``documents`` are (B, S) or None.

    Attributes:
        shape: sizes of the global batch and micro-batch, and the number of accumulation steps.
        loader: the loader of micro-batches, with its position in the data.
    """

    def __init__(self, config: Config, data: RunData, device: torch.device):
        ranks = dist.get_world_size()
        shape = batch_shape(config.training, dp=ranks)
        assert shape is not None, "the preflight checks the batch"
        self.shape, self.device = shape, device
        self.loader = build_loader.training_loader(
            config, data, shape, dp_rank=dist.get_rank(), dp_size=ranks, seed=config.debug.seed or 0
        )
        self._micro_batches: Iterator[Batch] | None = None

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> tuple[list[Batch], Tensor]:
        if self._micro_batches is None:  # starts at the position that load_checkpoint may have set
            self._micro_batches = iter(self.loader)
        rows: list[Batch] = [next(self._micro_batches) for _ in range(self.shape.accumulation)]
        on_device = [
            {name: None if it is None else it.to(self.device) for name, it in row.items()} for row in rows
        ]
        tokens = count_valid(on_device)
        dist.all_reduce(tokens)
        return on_device, tokens


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of the update after ``step`` finished steps, out of ``training.steps``."""
    options, steps = config.lr_scheduler, config.training.steps
    return scheduled_rate(step, options, lr=config.optimizer.lr, total_steps=steps)


def new_model(config: Config, data: RunData) -> Decoder:
    """Build the model on the meta device, in ``training.dtype``.

    Shard it, allocate it with ``model.to_empty(device=…)``, and fill it with :func:`init_weights` or
    :func:`load_weights`. ``model(tokens)`` returns logits (B, S, V); with ``labels``, the summed loss of all
    tokens. The caller applies FSDP, mixed precision, activation checkpointing and torch.compile.

    Raises:
        ConfigError: the configuration sets fine-tuning, another loss, distillation, converters, epochs, or
            tensor, context or pipeline parallelism, which only :func:`run` supports.
    """
    rule, fix = "new_model builds the plain model only", "remove it, or train with toolkit.run(config)"
    given = {key: attrgetter(key)(config) for key in _PLAIN}
    if problems := [Problem(rule, fix, key, it) for key, it in given.items() if it != _PLAIN[key]]:
        raise ConfigError(problems)
    args = model_args(config, tokenizer_vocab=data.n_words)
    return meta_decoder(
        args,
        attention=attention_name(config, detect(config.training.device).device, args),
        loss_chunk_tokens=config.training.loss_chunk_tokens,
        dtype=process_group.DTYPES[config.training.dtype],
    )


def _tensors(model: Decoder) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {clean_name(name): tensor for name, tensor in named}


def init_weights(model: Decoder, seed: int = 0) -> None:
    """Initialize a model's weights in place; the values are bitwise equal for any sharding."""
    initialize(_tensors(model).items(), seed, lambda name: init_rule(name, model.args))


def load_weights(model: Decoder, path: str | Path) -> None:
    """Load a Hugging Face folder, a Meta folder or a checkpoint into a model, in place.

    Each rank reads only what its shards need.

    Raises:
        DataError, CheckpointError: the weights are damaged, or a name or shape does not match the model.
    """
    load_source(open_weights(path), _tensors(model))


def save_checkpoint(
    config: Config, step: int, model: Decoder, optimizer: Optimizer, batches: GlobalBatches
) -> Path:
    """Save the state after ``step`` updates in the run's checkpoint folder, and return the new folder.

    All ranks call it. Saving is atomic. :func:`run` and the command line can load the checkpoint, on any
    mesh.

    Raises:
        CheckpointError: on every rank: it cannot be written. Earlier checkpoints are unchanged.
    """
    run = {
        **run_metadata(
            config, model.args, mesh=f"dp {dist.get_world_size()}", data_parallel=dist.get_world_size(),
            batch=batches.shape,
        ),
        "model_only": False,
        "loader": batches.loader.state_dict(),
    }  # fmt: skip
    return _checkpoints(config).save(step, _saved(model, optimizer), run)


def load_checkpoint(config: Config, model: Decoder, optimizer: Optimizer, batches: GlobalBatches) -> int:
    """Restore the model, the optimizer and the data position from the run's newest checkpoint, in place.

    Returns the number of finished steps, or 0 if there is no checkpoint.

    Raises:
        CheckpointError, DataError: on every rank: the checkpoint is damaged, or of another model or corpus.
    """
    checkpoints = _checkpoints(config)
    if (newest := checkpoints.latest()) is None:
        return 0
    manifest = checkpoints.load(newest, _saved(model, optimizer))
    batches.loader.load_state_dict(manifest["run"]["loader"])
    return newest


def export_hf(config: Config, step_folder: str | Path, out: str | Path) -> None:
    """Write the model of a checkpoint and the run's tokenizer as a Hugging Face folder.

    The dtype is ``checkpoint.export_dtype``. All ranks call it, and each writes its share.

    Raises:
        CheckpointError, DataError: on every rank: the checkpoint is unreadable, or the folder not writable.
    """
    place, dtype = build.tokenizer_path(config), process_group.DTYPES[config.checkpoint.export_dtype]
    export_folder(Path(step_folder), Path(out), dtype=dtype, tokenizer_path=place, ranks=Ranks())


def _checkpoints(config: Config) -> CheckpointManager:
    run_folder = expand_user(config.job.dump_folder)
    return CheckpointManager(
        expand_user(config.checkpoint.folder, inside=run_folder),
        keep_latest_k=config.checkpoint.keep_latest_k,
        keep_every_n=config.checkpoint.keep_every_n,
    )


def _saved(model: Decoder, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {f"model.{name}": tensor for name, tensor in _tensors(model).items()}
    parameters = [(clean_name(name), parameter) for name, parameter in model.named_parameters()]
    return tensors | optimizer_tensors(parameters, optimizer)


def load_model(
    path: str | Path, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> LoadedModel:
    """Load a model and its tokenizer for generation: a Hugging Face folder, a Meta folder, a checkpoint, or
    an adapter with its base.

    The default device is the first GPU if there is one; the default dtype is bfloat16 if the device supports
    it.

    Raises:
        DataError, CheckpointError: weights or tokenizer cannot be read.
    """
    place = torch.device(device) if device else process_group.local_device()
    return load_sharded(path, device=place, dtype=dtype or process_group.native_dtype(place))


def generate(
    model: LoadedModel, prompt: str, *, max_new_tokens: int = 64, temperature: float = 0.0, seed: int = 0
) -> str:
    """Return the model's continuation of ``prompt``: greedy, or sampled if ``temperature`` is set.

    Raises:
        DataError: the model has no tokenizer, or the prompt fills its context.
    """
    if (tokenizer := model.tokenizer) is None:
        raise DataError("the model has no tokenizer\n  fix:  copy its files next to the weights")
    [ids] = model.generator().generate(
        [tokenizer.encode(prompt, bos=tokenizer.adds_bos)],
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=temperature, seed=seed),
        stop_ids={*tokenizer.stop_ids, *model.eos_ids},
    )
    return tokenizer.decode(ids, skip_special=True)
