"""The forecast of a step's time: the work of the model's pieces at the rates of a machine.

An operation takes the longer of two times: its FLOPs at the part of the peak that such operations reach, and
its bytes at the memory's bandwidth. Compiled, what is between products is read and written once a chain. A
collective takes its ring's bytes over the slowest link of its ranks, and a latency a hop. FSDP's run beside
the computation of the unit before, and what is longer than that is exposed; those of tensor and context
parallelism are waited for, unless they are asynchronous. A pipeline does its schedule's own actions, one
after the other on each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from toolkit.config import Config
from toolkit.data.batch_size import batch_shape
from toolkit.metrics.flops import flops_per_token
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims, reshard_after_forward
from toolkit.parallel.pipeline_schedules import module_names, pipeline_stages
from toolkit.planner.costs import Costs, Piece, checkpointed_blocks, costs
from toolkit.planner.machines import Machine
from toolkit.planner.pipeline import Timeline, simulate
from toolkit.planner.rates import Pass, Rates

if TYPE_CHECKING:
    import torch

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


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


@dataclass(frozen=True)
class _Unit:
    """Passes of an FSDP unit, seconds of its collectives, and its numbers that are trained."""

    forward: Pass
    backward: Pass
    gather: float
    reduce: float
    all_reduce: float
    in_backward: bool  # gathered there again
    trained: int


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

    whole = [module_names(args.n_layers)]
    modules = pipeline_stages(options, args.n_layers).modules if layout.pp > 1 else whole
    stages = _stages(modules, config, rates, found(False), found(True))
    timeline = None
    if layout.pp > 1:
        hidden = rows * training.seq_len // (layout.cp * layout.tp) * args.dim * _BYTES[dtype]
        timeline, passes = _pipeline(stages, config, rates, count, hidden)
    else:
        passes = _accumulated(stages[0], config, rates, count)
    optimizer = max(_update(stage, found(True), rates) for stage in stages) * len(stages) / layout.pp
    busy = passes.seconds
    seconds = (timeline.seconds if timeline else busy) + optimizer
    tokens = batch.total * training.seq_len
    at_peak = layout.world_size * rates.peak * seconds
    full, causal = (flops_per_token(args, seq_len=training.seq_len, causal=it) for it in (False, True))
    return StepTime(
        seconds=seconds,
        compute=passes.compute,
        exposed={name: value for name, value in passes.exposed.items() if value},
        bubble=timeline.seconds - busy if timeline else 0.0,
        optimizer=optimizer,
        tokens_per_second=tokens / seconds,
        mfu=full * tokens / at_peak,
        mfu_causal=causal * tokens / at_peak,
        timeline=timeline,
    )


# Units and stages


def _stages(
    modules: Sequence[Sequence[str]], config: Config, rates: Rates, kept: Costs, again: Costs
) -> list[list[_Unit]]:
    """The units of each stage, in the order of their forwards."""
    made: dict[int, _Unit] = {}
    float8 = any("float8" in it for it in config.model.converters)

    def unit(piece: Piece) -> _Unit:
        if id(piece) not in made:
            fused = config.compile.blocks
            if piece is kept.head:
                fused = config.compile.enable and "loss" in config.compile.components
            made[id(piece)] = _unit(
                piece, rates, fused=fused, float8=float8 and piece not in (kept.head, kept.embedding),
                in_backward=piece is not kept.embedding,
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


def _unit(piece: Piece, rates: Rates, *, fused: bool, float8: bool, in_backward: bool) -> _Unit:
    # A gather reads the fp32 part that is stored, writes it as it is computed in and puts the whole together;
    # a reduction makes fp32 of the gradients and adds its part to what is stored.
    ranks, gathered, gradients = rates.groups["dp_shard"][0], piece.gathered_bytes, 4.0 * piece.trained
    gather = rates.copy((4 * piece.numbers + gathered) / ranks + 2 * gathered)
    reduce = rates.copy(1.5 * gradients + 2 * gradients / ranks)
    run = partial(rates.run, fused=fused, float8=float8)
    return _Unit(
        forward=run(piece.forward),
        backward=_sum([run(piece.again), run(piece.backward)]),
        gather=gather + rates.send("dp_shard", "all_gather", gathered),
        reduce=reduce + rates.send("dp_shard", "reduce_scatter", gradients),
        all_reduce=rates.send("dp_replicate", "all_reduce", gradients / ranks),
        in_backward=in_backward,
        trained=piece.trained,
    )


def _sum(passes: Iterable[Pass], times: float = 1.0) -> Pass:
    compute, exposed = 0.0, dict[str, float]()
    for each in passes:
        compute += each.compute * times
        for dimension, seconds in each.exposed.items():
            exposed[dimension] = exposed.get(dimension, 0.0) + seconds * times
    return Pass(compute, exposed)


# FSDP


def _gathering(units: Sequence[_Unit], rates: Rates) -> float:
    """What gathering exposes of a forward: the first unit's, and of the others what is longer than the unit
    before takes."""
    if not rates.machine.overlaps:
        return sum(unit.gather for unit in units)
    later = zip(units, units[1:], strict=False)
    return units[0].gather + sum(max(0.0, it.gather - before.forward.seconds) for before, it in later)


def _reducing(units: Sequence[_Unit], rates: Rates, *, gathers: bool, reduces: bool, replicas: bool) -> float:
    """What communication exposes of a backward: beside a unit the one before it is gathered and the one after
    it reduced; the first unit's reduction is beside nothing."""
    exposed = owed = 0.0
    for place in reversed(range(len(units))):
        unit = units[place]
        before = units[place - 1] if place else None
        beside = owed + (before.gather if gathers and before and before.in_backward else 0.0)
        exposed += max(0.0, beside - (unit.backward.seconds if rates.machine.overlaps else 0.0))
        owed = (unit.reduce if reduces else 0.0) + (unit.all_reduce if replicas else 0.0)
    return exposed + owed


def _around(
    units: Sequence[_Unit], rates: Rates, *, gathers: bool, last: bool, each: bool
) -> dict[str, float]:
    """What FSDP exposes of a backward, by dimension, in the ``last`` one of a step or another."""
    without = _reducing(units, rates, gathers=gathers, reduces=last or each, replicas=False)
    with_replicas = _reducing(units, rates, gathers=gathers, reduces=last or each, replicas=last)
    return {"dp_shard": without, "dp_replicate": with_replicas - without}


def _accumulated(units: Sequence[_Unit], config: Config, rates: Rates, count: int) -> Pass:
    """The micro-batches of a step without a pipeline."""
    options = config.parallelism
    keeps, each = reshard_after_forward(options) == "never", options.fsdp_sync_each_batch
    gathers = Pass(0.0, {"dp_shard": _gathering(units, rates)})
    ends = [Pass(0.0, _around(units, rates, gathers=not keeps, last=it, each=each)) for it in (False, True)]
    return _sum(
        [
            _sum([pass_ for unit in units for pass_ in (unit.forward, unit.backward)], count),
            _sum([gathers], 1 if keeps else count),
            _sum([ends[False]], count - 1),
            ends[True],
        ]
    )


def _pipeline(
    stages: Sequence[Sequence[_Unit]], config: Config, rates: Rates, count: int, hidden: float
) -> tuple[Timeline, Pass]:
    """The timeline of the schedule, and the mean of the ranks' passes; ``hidden`` are the bytes that go from
    rank to rank."""
    options = config.parallelism
    passes = [(_sum(it.forward for it in units), _sum(it.backward for it in units)) for units in stages]
    gathers = [sum(it.gather for it in units) for units in stages]
    more = [0.0] * len(stages)
    if reshard_after_forward(options) != "never":  # gathered in each pass
        more, gathers = [_gathering(units, rates) for units in stages], more
    timeline = simulate(
        options.pipeline_parallel_schedule,
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
    total = [_sum([it for both in passes for it in both], count), exposed]
    return timeline, _sum(total, 1 / options.pipeline_parallel_degree)


def _update(units: Sequence[_Unit], found: Costs, rates: Rates) -> float:
    """The optimizer on what this rank stores of ``units``: the norm reads gradients, clipping scales them."""
    numbers = sum(unit.trained for unit in units) / rates.groups["dp_shard"][0]
    simple = sum(it.bytes * it.count for it in found.update.operations if it.kind == "other")
    step = rates.run(found.update).compute + rates.copy(simple) - simple / rates.machine.bandwidth
    return step * numbers / max(1, found.updated) + rates.copy(3 * 4.0 * numbers)
