"""The forecast of a step's time: the work of the model's pieces at the rates of a machine.

An operation takes the longer of two times: its FLOPs at the part of the peak that such operations reach, and
its bytes at the memory's bandwidth. Compiled, what is between products is read and written once a chain. A
collective takes its ring's bytes over the slowest link of its ranks, and a latency a hop. FSDP's run beside
the computation of the unit before, and what is longer than that is exposed; those of tensor and context
parallelism are waited for, unless they are asynchronous. A pipeline does its schedule's own actions, one
after the other on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.config import Config
from toolkit.data.batch_size import batch_shape
from toolkit.metrics.flops import model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.optim.optimizer import OPTIMIZERS
from toolkit.parallel.dims import ParallelDims, reshard_after_forward
from toolkit.parallel.pipeline_schedules import Stages, module_names, pipeline_stages
from toolkit.planner.costs import checkpointed_blocks, costs
from toolkit.planner.machines import Machine
from toolkit.planner.pipeline import Timeline, simulate
from toolkit.planner.rates import Pass, Rates
from toolkit.planner.units import Unit, accumulating, added, around_backward, gathering, unit_of
from toolkit.planner.work import BYTES, Costs, Piece

if TYPE_CHECKING:
    import torch

_OF_FILES = {"PipelineScheduleSingle": "1F1B", "PipelineScheduleMulti": "LoopedBFS"}
"""The schedules that stand in for those of files."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, of a pipeline the mean over its ranks. The parts add up to it.

    Attributes:
        compute: of forward, backward, what is computed again, and copies.
        exposed: communication that nothing runs beside, by dimension: "tp", "cp", "dp_shard" (FSDP's, over
            cp's ranks too), "dp_replicate".
        bubble: waiting for other ranks of the pipeline, transfers included.
        optimizer: clipping and update.
        tokens_per_second: of all ranks.
        mfu: model FLOPs by the peak, in the convention of the run's metrics: attention over the full square.
        mfu_causal: with the half of the square that is seen.
        timeline: of a pipeline.
    """

    seconds: float
    compute: float
    exposed: dict[str, float]
    bubble: float
    optimizer: float
    tokens_per_second: float
    mfu: float
    mfu_causal: float
    timeline: Timeline | None


def step_time(
    config: Config, args: ModelArgs, layout: ParallelDims, machine: Machine, *, param_dtype: torch.dtype
) -> StepTime:
    """Forecast a step of a run that passed the preflight, on ``machine``.

    The costs of the pieces are found in a fake step and kept, for which there must be no process group; with
    them it takes milliseconds.
    """
    dtype = str(param_dtype).removeprefix("torch.")
    rates = Rates(config, layout, machine, dtype)
    training, options = config.training, config.parallelism
    batch = batch_shape(
        global_batch_size=training.global_batch_size, local_batch_size=training.local_batch_size, dp=layout.dp
    )
    assert batch, "the preflight found that the batch divides"
    rows = options.pipeline_parallel_microbatch_size if layout.pp > 1 else batch.local
    count = batch.total // layout.dp // rows

    def found(checkpointed: bool) -> Costs:
        return costs(
            config, args, tp=layout.tp, cp=layout.cp, rows=rows, checkpointed=checkpointed,
            param_dtype=param_dtype,
        )  # fmt: skip

    cut = Stages([module_names(args.n_layers)], [[0]])
    if layout.pp > 1:
        cut = pipeline_stages(options, args.n_layers)
    stages = _stages(cut.modules, config, rates, found(False), found(True))
    timeline = None
    if layout.pp > 1:
        hidden = rows * training.seq_len // (layout.cp * layout.tp) * args.dim * BYTES[dtype]
        timeline, passes = _pipeline(stages, config, rates, count, hidden)
    else:
        passes = _accumulated(stages[0], config, rates, count)
    held = [[unit for stage in each for unit in stages[stage]] for each in cut.of_ranks]
    optimizer = max(_update(units, found(True), config, rates) for units in held)
    busy = passes.seconds
    passed = timeline.seconds if timeline else busy
    seconds = passed + optimizer
    tokens = batch.total * training.seq_len
    at_peak = layout.world_size * rates.peak * seconds
    full, causal = (
        model_flops(args, config.finetune, seq_len=training.seq_len, causal=it) for it in (False, True)
    )
    return StepTime(
        seconds=seconds,
        compute=passes.compute,
        exposed={name: value for name, value in passes.exposed.items() if value},
        bubble=passed - busy,
        optimizer=optimizer,
        tokens_per_second=tokens / seconds,
        mfu=full * tokens / at_peak,
        mfu_causal=causal * tokens / at_peak,
        timeline=timeline,
    )


# Units and stages


def _stages(
    modules: Sequence[Sequence[str]], config: Config, rates: Rates, kept: Costs, again: Costs
) -> list[list[Unit]]:
    """The units of each stage, in the order of their forwards."""
    made: dict[int, Unit] = {}
    reduced = BYTES[config.training.mixed_precision_reduce]

    def unit(piece: Piece) -> Unit:
        if id(piece) not in made:
            fused = config.compile.blocks
            if piece is kept.head:
                fused = config.compile.enable and "loss" in config.compile.components
            made[id(piece)] = unit_of(
                piece, rates, fused=fused, float8=rates.float8 and piece not in (kept.head, kept.embedding),
                in_backward=piece is not kept.embedding, reduced=reduced,
            )  # fmt: skip
        return made[id(piece)]

    found = []
    for names in modules:
        layers = [name for name in names if name.startswith("layers.")]
        checkpointed = checkpointed_blocks(config.activation_checkpoint, len(layers))
        units = [unit(kept.embedding)] if "tok_embeddings" in names else []
        for index, name in enumerate(layers):
            side = again if index in checkpointed else kept
            units.append(unit(side.first if name == "layers.0" else side.block))
        found.append(units + ([unit(kept.head)] if "output" in names else []))
    return found


def _accumulated(units: Sequence[Unit], config: Config, rates: Rates, count: int) -> Pass:
    """The micro-batches of a step without a pipeline."""
    options = config.parallelism
    keeps, each = reshard_after_forward(options) == "never", options.fsdp_sync_each_batch
    gathers = Pass(0.0, {"dp_shard": gathering(units)})
    ends = [Pass(0.0, around_backward(units, gathers=not keeps, last=it, each=each)) for it in (False, True)]
    return added(
        [
            added([pass_ for unit in units for pass_ in (unit.forward, unit.backward)], count),
            _summing(units, config, rates, count, whole=not each),
            added([gathers], 1 if keeps else count),
            added([ends[False]], count - 1),
            ends[True],
        ]
    )


def _summing(units: Sequence[Unit], config: Config, rates: Rates, count: int, *, whole: bool) -> Pass:
    reduced = BYTES[config.training.mixed_precision_reduce]
    return accumulating(units, rates, count, whole=whole, gradient=BYTES[rates.dtype], reduced=reduced)


def _pipeline(
    stages: Sequence[Sequence[Unit]], config: Config, rates: Rates, count: int, hidden: float
) -> tuple[Timeline, Pass]:
    """The timeline of the schedule, and the mean of the ranks' passes; ``hidden`` are the bytes that go from
    rank to rank."""
    options = config.parallelism
    passes = []
    for units in stages:
        sums = added([_summing(units, config, rates, count, whole=True)], 1 / count)
        passes.append((added(it.forward for it in units), added([*(it.backward for it in units), sums])))
    gathers = [sum(it.gather for it in units) for units in stages]
    more = [0.0] * len(stages)
    if reshard_after_forward(options) != "never":  # gathered in each pass
        more, gathers = [gathering(units) for units in stages], more
    timeline = simulate(
        _OF_FILES.get(options.pipeline_parallel_schedule, options.pipeline_parallel_schedule),
        options.pipeline_parallel_degree,
        count,
        forward=[forward.seconds + it for (forward, _), it in zip(passes, more, strict=True)],
        backward=[backward.seconds + it for (_, backward), it in zip(passes, more, strict=True)],
        gather=gathers,
        reduce=[sum(it.reduce + it.all_reduce for it in units) for units in stages],
        units=[len(units) for units in stages],
        transfer=rates.send("pp", "send", hidden),
    )
    exposed = Pass(
        0.0, {"dp_shard": 2 * count * sum(more) + timeline.waits * options.pipeline_parallel_degree}
    )
    total = [added([it for both in passes for it in both], count), exposed]
    return timeline, added(total, 1 / options.pipeline_parallel_degree)


def _update(units: Sequence[Unit], found: Costs, config: Config, rates: Rates) -> float:
    """The optimizer on what this rank stores of ``units``: the norm reads gradients, clipping scales them,
    where the update does not."""
    numbers = sum(unit.trained for unit in units) / rates.groups["dp_shard"][0]
    step = rates.run(found.update).compute
    options = config.optimizer
    clips = not (options.name in OPTIMIZERS and options.implementation == "fused")
    return step * numbers / max(1, found.updated) + rates.copy((3 if clips else 1) * 4.0 * numbers)
