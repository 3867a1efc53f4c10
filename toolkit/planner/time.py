"""Forecast the step time from the measured work of the model and the rates of a machine.

An operation takes the longer of two times: its FLOPs at the achieved rate, and its bytes at memory bandwidth.
In compiled code, operations between GEMMs are fused, and each chain reads and writes memory once. A
collective takes the time to send its bytes over the slowest link of its ring, plus a latency per hop. FSDP's
collectives overlap with the computation of the previous unit, and only the excess is exposed. Collectives of
tensor and context parallelism are exposed unless they are asynchronous. In a pipeline, each rank runs the
actions of its schedule in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.config import Config
from toolkit.metrics.flops_finetune import model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.optim.optimizer import OPTIMIZERS
from toolkit.parallel.dims import ParallelDims, reshard_after_forward
from toolkit.parallel.pipeline_schedules import Stages, module_names, pipeline_stages
from toolkit.planner.costs import checkpointed_blocks, costs, is_dense
from toolkit.planner.layouts import samples
from toolkit.planner.machines import Machine
from toolkit.planner.pipeline import Timeline, simulate
from toolkit.planner.rates import Pass, Rates
from toolkit.planner.units import (
    UnitTime,
    accumulation,
    backward_communication,
    exposed_gathers,
    sum_passes,
    unit_time,
)
from toolkit.planner.work import BYTES, Costs, ModuleCost

if TYPE_CHECKING:
    import torch

_FILE_SCHEDULES = {"PipelineScheduleSingle": "1F1B", "PipelineScheduleMulti": "LoopedBFS"}
"""Schedules that approximate schedules from files."""


@dataclass(frozen=True)
class StepTime:
    """Step time in seconds and its parts, the mean over the ranks of a pipeline.

    Attributes:
        compute: forward, backward, recomputation and copies.
        exposed: communication without overlap, by dimension: "tp", "cp", "ep", "dp_shard" (FSDP,
            including cp's ranks and that of experts), "dp_replicate".
        bubble: waiting for other pipeline ranks, including transfers.
        optimizer: clipping and update.
        tokens_per_second: on all ranks.
        mfu: model FLOPs utilization as in the run's metrics, with full attention.
        mfu_causal: the same with causal attention.
        timeline: timeline of the pipeline, if there is one.
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
    """Forecast the time of a step on ``machine``, in a run that passed the preflight.

    Costs are measured in fake steps, which must run without a process group, and are cached. Afterwards, a
    forecast takes milliseconds.
    """
    dtype = str(param_dtype).removeprefix("torch.")
    rates = Rates(config, layout, machine, dtype)
    training, options = config.training, config.parallelism
    rows, count = samples(config, layout)

    def measured(checkpointed: bool) -> Costs:
        return costs(
            config, args, tp=layout.tp, cp=layout.cp, ep=layout.ep, etp=layout.etp, rows=rows,
            checkpointed=checkpointed, param_dtype=param_dtype,
        )  # fmt: skip

    split = Stages([module_names(args.n_layers)], [[0]])
    if layout.pp > 1:
        split = pipeline_stages(options, args.n_layers)
    stages = _stages(split.modules, config, args, rates, measured(False), measured(True))
    timeline = None
    if layout.pp > 1:
        hidden = rows * training.seq_len // (layout.cp * layout.tp) * args.dim * BYTES[dtype]
        timeline, passes = _pipeline(stages, config, rates, count, hidden)
    else:
        passes = _without_pipeline(stages[0], config, rates, count)
    by_rank = [[unit for stage in each for unit in stages[stage]] for each in split.of_ranks]
    optimizer = max(_update(units, measured(False), config, rates) for units in by_rank)
    busy = passes.seconds
    passed = timeline.seconds if timeline else busy
    seconds = passed + optimizer
    tokens = rows * count * layout.dp * training.seq_len
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
    modules: Sequence[Sequence[str]],
    config: Config,
    args: ModelArgs,
    rates: Rates,
    kept: Costs,
    recomputed: Costs,
) -> list[list[UnitTime]]:
    """Return the FSDP units of each stage, in forward order."""
    cache: dict[int, UnitTime] = {}
    reduced = BYTES[config.training.mixed_precision_reduce]

    def unit(part: ModuleCost) -> UnitTime:
        if id(part) not in cache:
            fused = config.compile.blocks
            if part is kept.head:
                fused = config.compile.enable and "loss" in config.compile.components
            cache[id(part)] = unit_time(
                part, rates, fused=fused, float8=rates.float8 and part not in (kept.head, kept.embedding),
                in_backward=part is not kept.embedding, reduced=reduced,
            )  # fmt: skip
        return cache[id(part)]

    stages = []
    for names in modules:
        layers = [name for name in names if name.startswith("layers.")]
        checkpointed = checkpointed_blocks(config.activation_checkpoint, len(layers))
        units = [unit(kept.embedding)] if "tok_embeddings" in names else []
        for index, name in enumerate(layers):
            side = recomputed if index in checkpointed else kept
            first = name == "layers.0" or is_dense(args, name)
            units.append(unit(side.first if first else side.block))
        stages.append(units + ([unit(kept.head)] if "output" in names else []))
    return stages


def _without_pipeline(units: Sequence[UnitTime], config: Config, rates: Rates, count: int) -> Pass:
    """Return the time of a step's micro-batches without a pipeline."""
    options = config.parallelism
    keeps, each = reshard_after_forward(options) == "never", options.fsdp_sync_each_batch
    gathers = Pass(0.0, {"dp_shard": exposed_gathers(units)})
    ends = [
        Pass(0.0, backward_communication(units, gathers=not keeps, last=it, each=each))
        for it in (False, True)
    ]
    return sum_passes(
        [
            sum_passes([pass_ for unit in units for pass_ in (unit.forward, unit.backward)], count),
            _accumulation(units, config, rates, count, whole=not each),
            sum_passes([gathers], 1 if keeps else count),
            sum_passes([ends[False]], count - 1),
            ends[True],
        ]
    )


def _accumulation(
    units: Sequence[UnitTime], config: Config, rates: Rates, count: int, *, whole: bool
) -> Pass:
    reduced = BYTES[config.training.mixed_precision_reduce]
    return accumulation(units, rates, count, whole=whole, gradient=BYTES[rates.dtype], reduced=reduced)


def _pipeline(
    stages: Sequence[Sequence[UnitTime]], config: Config, rates: Rates, count: int, hidden: float
) -> tuple[Timeline, Pass]:
    """Return the timeline of the schedule, and the mean of the ranks' passes; ``hidden`` is the size of each
    transfer in bytes."""
    options = config.parallelism
    passes = []
    for units in stages:
        sums = sum_passes([_accumulation(units, config, rates, count, whole=True)], 1 / count)
        passes.append(
            (sum_passes(it.forward for it in units), sum_passes([*(it.backward for it in units), sums]))
        )
    gathers = [sum(it.gather for it in units) for units in stages]
    more = [0.0] * len(stages)
    if reshard_after_forward(options) != "never":  # gathered in each pass
        more, gathers = [exposed_gathers(units) for units in stages], more
    timeline = simulate(
        _FILE_SCHEDULES.get(options.pipeline_parallel_schedule, options.pipeline_parallel_schedule),
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
    total = [sum_passes([it for both in passes for it in both], count), exposed]
    return timeline, sum_passes(total, 1 / options.pipeline_parallel_degree)


def _update(units: Sequence[UnitTime], measured: Costs, config: Config, rates: Rates) -> float:
    """Return the optimizer's time on this rank's shards of ``units``, including the norm, and clipping unless
    it is fused into the update."""
    elements = sum(unit.stored for unit in units)
    step = rates.run(measured.update).compute
    options = config.optimizer
    clips = not (options.name in OPTIMIZERS and options.implementation == "fused")
    return step * elements / max(1, measured.updated) + rates.copy((3 if clips else 1) * 4.0 * elements)
