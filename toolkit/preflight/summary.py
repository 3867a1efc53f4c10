"""Describe a valid run, with notes about surprising settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from toolkit.config import Config
from toolkit.errors import one_line
from toolkit.hardware import Hardware
from toolkit.models.parameters import parameter_count
from toolkit.parallel.dims import ParallelDims, strategy_in_effect
from toolkit.preflight import rules
from toolkit.preflight.planned_run import NOTES, Note, PlannedRun


def notes(config: Config, *, world_size: int, hardware: Hardware, only: Collection[str] = ()) -> list[str]:
    """Return notes about valid but surprising settings; ``only`` selects notes by name."""
    run = PlannedRun(config, world_size, hardware)
    training = config.training
    files = [file.__name__ for file in rules.load(config, hardware.device)]
    messages = [message for file in files for note in _notes(file, only) for message in note(run)]
    if run.mesh and run.batch and not only:
        total, local, per_rank = run.batch.total, run.batch.local, run.batch.total // run.mesh.dp
        if training.global_batch_size == -1:
            messages.append(
                f"training.global_batch_size is -1, which is {total} on this mesh; "
                f"set it to {total} for the same run on any mesh"
            )
        if run.pp == 1 and local < min(training.local_batch_size, per_rank):
            messages.append(
                f"the {per_rank} samples of a rank are split into micro-batches of {local}: "
                f"training.local_batch_size {training.local_batch_size} does not divide them"
            )
    validation = config.validation
    if run.mesh and validation.enable and validation.steps != -1:
        samples = validation.steps * validation.local_batch_size * run.mesh.dp
        messages.append(
            f"validation.steps counts batches per rank, {samples} samples in total on this mesh; use "
            f"validation.samples = {samples} instead for the same loss on any mesh"
        )
    if training.mixed_precision_output != "auto":
        messages.append("training.mixed_precision_output has no effect: training returns no logits")
    if config.compile.enable:
        messages.append(
            "the first step compiles, which takes up to some minutes; the code is cached in "
            f"compile.cache_folder ({config.compile.cache_folder}) for the next start"
        )
    asks_bf16 = "bfloat16" in (training.dtype, training.mixed_precision_param)
    if asks_bf16 and hardware.device == "cpu" and not hardware.native_bf16:
        messages.append("this CPU has no native bfloat16 matmuls: float32 is faster")
    return messages


def summary(config: Config, *, world_size: int, hardware: Hardware) -> str:
    """Describe a run that passed :func:`check`: model, mesh, techniques, batch."""
    run = PlannedRun(config, world_size, hardware)
    model, mesh, batch = run.model, run.mesh, run.batch
    assert model is not None and mesh is not None and batch is not None
    cut = f"{mesh.dp} data-parallel × {batch.local} local × {batch.accumulation} accumulated"
    if run.pp > 1:
        size = config.parallelism.pipeline_parallel_microbatch_size
        cut = f"{mesh.dp} data-parallel × {run.micro_batches} micro-batches of {size}"
    return "\n".join(
        [
            f"model  {run.model_label}, {parameter_count(model):,} parameters",
            f"mesh   {mesh} on {hardware.name}",
            f"with   {', '.join(_techniques(run, mesh))}",
            f"batch  {batch.total} samples ({cut}) of {config.training.seq_len} tokens",
        ]
    )


def _techniques(run: PlannedRun, mesh: ParallelDims) -> Iterator[str]:
    """Yield descriptions of how the model is sharded, checkpointed and computed."""
    options, checkpointing = run.config.parallelism, run.config.activation_checkpoint
    yield strategy_in_effect(options, mesh)
    if mesh.pp > 1:
        file = options.pipeline_parallel_schedule_csv
        yield f"schedule {f'of {file}' if file else options.pipeline_parallel_schedule}"
    every = checkpointing.selective_ac_option
    modes = {
        "none": "all activations saved",
        "full": "every block recomputed",
        "selective": {"op": "recomputed by operator", "matmul": "all but matmuls recomputed"}.get(
            every, f"one block of {every} recomputed"
        ),
        "memory_budget": f"recomputed to a memory budget of {checkpointing.memory_budget:g}",
    }
    yield modes[checkpointing.mode]
    yield f"{run.attention} attention"
    yield "compiled" if run.config.compile.enable else "eager"


def _notes(file: str, only: Collection[str]) -> list[Note]:
    return [note for note in NOTES if note.__module__ == file and (not only or note.__name__ in only)]


def describe(config: Config, *, world_size: int, hardware: Hardware) -> str:
    """Return :func:`summary` and one line for each of :func:`notes`."""
    messages = notes(config, world_size=world_size, hardware=hardware)
    lines = [f"note   {one_line(message)}" for message in messages]
    return "\n".join([summary(config, world_size=world_size, hardware=hardware), *lines])
