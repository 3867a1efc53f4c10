"""Format the result of a search: the table of layouts, the rejected ones, and the breakdown of the first."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.metrics.flops_finetune import model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import parameter_count
from toolkit.planner.layouts import samples
from toolkit.planner.machines import Machine
from toolkit.planner.search import Candidate, SearchResult

_SLOWER = {
    "compute": "more computation",
    "bubble": "larger pipeline bubble",
    "tp": "more exposed communication of tp",
    "cp": "more exposed communication of cp",
    "ep": "more exposed communication of ep",
    "dp_shard": "more exposed communication of FSDP",
    "dp_replicate": "more exposed communication of replicas",
}
_REASONS = {
    "bound": "lower bound of the step time is above the last one shown",
    "stages": "more stages than the model has layers",
    "node": "tp across nodes: it communicates four times per block, without overlap",
    "batch": "dp does not divide the global batch",
    "needless cp": "cp larger than needed: dp ranks do the same work with less communication",
    "replicas": "replicas that share a node: the whole node could shard",
    "forwards first": "GPipe and LoopedBFS: same bubble as 1F1B, but all micro-batches in memory",
}


def headline(args: ModelArgs, world: int, machine: Machine, result: SearchResult) -> str:
    """Describe the model and the GPUs in one line."""
    return (
        f"{parameter_count(args):,} parameters on {world} {machine.name} of {gib(machine.memory)}, "
        f"{machine.node} per node; {gib(result.capacity)} usable for tensors; {result.timed} layouts timed"
    )


def table_lines(result: SearchResult, world: int, tokens: float | None, price: float | None) -> Iterator[str]:
    """Yield one row per layout; with ``tokens``, also the days and GPU-hours to train on them, and the cost
    at ``price``."""
    rows = [["", "layout", "micro-batch", "recomputed", "schedule", "memory", "step", "tok/s/GPU", "MFU"]]
    rows[0] += ["days", "GPU-hours"] if tokens else []
    rows[0] += ["cost"] if price else []
    for number, each in enumerate(result.ranked, 1):
        assert each.time
        row = [str(number), str(each.layout), *choices(each)]
        row += [f"{'' if each.peak else '~'}{gib(each.bytes)}", f"{each.seconds:.3g} s"]
        row += [f"{each.time.tokens_per_second / world:,.0f}", f"{each.time.mfu:.1%}"]
        if tokens:
            hours = tokens / each.time.tokens_per_second / 3600
            row += [f"{hours / 24:,.1f}", f"{hours * world:,.0f}"]
            row += [f"{hours * world * price:,.0f}"] if price else []
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    yield "~ estimated; the others measured in a fake step of the rank with the highest memory"


def choices(each: Candidate) -> list[str]:
    """Return micro-batch size and count, checkpointing, and schedule or resharding."""
    options, checkpointing = each.config.parallelism, each.config.activation_checkpoint
    size, count = samples(each.config, each.layout)
    mode: str = checkpointing.mode
    mode += f" {checkpointing.selective_ac_option}" if mode == "selective" else ""
    schedule: str = options.pipeline_parallel_schedule if each.layout.pp > 1 else ""
    if per_stage := options.pipeline_parallel_layers_per_stage if each.layout.pp > 1 else None:
        schedule += f" of {per_stage}"
    if options.fsdp_reshard_after_forward != "default":
        schedule += f" reshard {options.fsdp_reshard_after_forward}"
    return [f"{size} × {count}", mode, schedule.strip() or "-"]


def rejected_lines(result: SearchResult) -> Iterator[str]:
    """Yield one line per class of rejected layouts."""
    winner = result.ranked[0]
    yield "Rejected layouts, with the best or first of each kind:"
    for name, layouts in result.rejected.items():
        best = f"{layouts.best.layout}, {' '.join(choices(layouts.best))}" if layouts.best else ""
        if name == "fit":
            size = f"; {best}: {gib(layouts.best.bytes)} of {gib(result.capacity)}" if layouts.best else ""
            yield f"  {layouts.count:>6,}  do not fit{size}"
        elif name in _SLOWER:
            assert layouts.best and layouts.best.time
            spent = {"compute": layouts.best.time.compute, "bubble": layouts.best.time.bubble}
            part = (spent | layouts.best.time.exposed)[name] / layouts.best.seconds
            slower = layouts.best.seconds / winner.seconds - 1
            yield (
                f"  {layouts.count:>6,}  {_SLOWER[name]}; {best}: {part:.0%} of its step, {slower:.1%} slower"
            )
        else:
            reason = _REASONS.get(name) or f"rejected by the preflight: {name}: {layouts.reason}"
            yield f"  {layouts.count:>6,}  {reason}"


def breakdown_lines(result: SearchResult, args: ModelArgs, machine: Machine) -> Iterator[str]:
    """Yield the memory and the step time of the first layout, by part."""
    best, capacity = result.ranked[0], result.capacity
    config, layout, time = best.config, best.layout, best.time
    assert time
    parts, parameters = best.memory.parts, parameter_count(args)
    yield f"{best.layout}, {' '.join(choices(best))}:"
    yield (
        f"  weights, gradients, optimizer state: {parameters:,} parameters "
        f"× {result.states / parameters:.3g} bytes = {gib(result.states)}, "
        f"{'fits' if result.states < capacity else 'does not fit'} on one {machine.name}"
    )
    yield f"  highest memory, on pipeline rank {best.memory.rank} of {layout.pp}:"
    for name, size in parts.items():
        if size:
            yield f"    {name:<20} {gib(size):>10}"
    yield f"    {'total':<20} {gib(best.memory.bytes):>10}  estimated"
    if best.peak:
        yield f"    {'peak':<20} {gib(best.peak):>10}  in a fake step, of {gib(capacity)} usable"
    training = config.training
    tokens = training.global_batch_size * training.seq_len
    flops = model_flops(args, config.finetune, seq_len=training.seq_len)
    yield (
        f"  a step: {training.global_batch_size} samples × {training.seq_len} tokens × "
        f"{flops / 1e9:,.1f} GFLOP = {flops * tokens / 1e15:,.1f} PFLOP over {layout.world_size} GPUs: "
        f"{time.mfu * time.seconds:.3g} s at peak FLOP/s"
    )
    yield f"    {'compute':<20} {time.compute:>8.3f} s  at achieved rates, with recomputation"
    for name, seconds in time.exposed.items():
        yield f"    {f'{name} exposed':<20} {seconds:>8.3f} s"
    if time.bubble:
        yield f"    {'pipeline bubble':<20} {time.bubble:>8.3f} s"
    yield f"    {'optimizer':<20} {time.optimizer:>8.3f} s"
    yield f"    {'total':<20} {time.seconds:>8.3f} s"


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / 2**30:,.1f} GiB"
