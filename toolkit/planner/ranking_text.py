"""Words for what a search has found: the table of layouts, why the others lose, and the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.metrics.flops import model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import parameter_count
from toolkit.planner.estimate import samples
from toolkit.planner.machines import Machine
from toolkit.planner.search import Candidate, Found

_LOSES = {
    "compute": "compute more",
    "bubble": "wait longer in the pipeline",
    "tp": "wait longer for tp",
    "cp": "wait longer for cp",
    "dp_shard": "wait longer for FSDP",
    "dp_replicate": "wait longer for the replicas",
}
_NOT_TRIED = {
    "bound": "cannot be faster than the last one shown: GEMMs or all but recomputation take longer",
    "stages": "more stages than the model has layers",
    "node": "tp across nodes: it sends four times a block, and is waited for",
    "batch": "dp does not divide the global batch",
    "needless cp": "cp larger than is needed: ranks of dp do the same and send less",
    "replicas": "replicas that share a node: the whole node could shard",
    "forwards first": "GPipe and LoopedBFS: they wait as 1F1B does, and keep all micro-batches",
}


def head(args: ModelArgs, world: int, machine: Machine, found: Found) -> str:
    """The model and the GPUs in a line."""
    return (
        f"{parameter_count(args):,} parameters on {world} {machine.name} of {gib(machine.memory)}, "
        f"{machine.node} a node; tensors may take {gib(found.room)}; {found.timed} layouts timed"
    )


def table(found: Found, world: int, tokens: float | None, price: float | None) -> Iterator[str]:
    """A row a layout; with ``tokens`` the days and GPU-hours to train on them, at a ``price``."""
    rows = [["", "layout", "micro-batch", "recomputed", "schedule", "memory", "step", "tok/s/GPU", "MFU"]]
    rows[0] += ["days", "GPU-hours"] if tokens else []
    rows[0] += ["cost"] if price else []
    for number, each in enumerate(found.ranked, 1):
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
    yield "~ by arithmetic; the others by a fake step of the fullest rank"


def choices(each: Candidate) -> list[str]:
    """Micro-batch and their number, checkpointing, and the schedule or whether parameters stay gathered."""
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


def losers(found: Found) -> Iterator[str]:
    """A line for each class of layouts that lose."""
    winner = found.ranked[0]
    yield "Why the others lose, and the best of each kind, or the first:"
    for name, lost in found.losers.items():
        best = f"{lost.best.layout}, {' '.join(choices(lost.best))}" if lost.best else ""
        if name == "fit":
            size = f"; {best}: {gib(lost.best.bytes)} of {gib(found.room)}" if lost.best else ""
            yield f"  {lost.count:>6,}  do not fit{size}"
        elif name in _LOSES:
            assert lost.best and lost.best.time
            spent = {"compute": lost.best.time.compute, "bubble": lost.best.time.bubble}
            part = (spent | lost.best.time.exposed)[name] / lost.best.seconds
            slower = lost.best.seconds / winner.seconds - 1
            yield f"  {lost.count:>6,}  {_LOSES[name]}; {best}: {part:.0%} of its step, {slower:.1%} slower"
        else:
            why = _NOT_TRIED.get(name) or f"refused by the preflight: {name}: {lost.reason}"
            yield f"  {lost.count:>6,}  {why}"


def explained(found: Found, args: ModelArgs, machine: Machine) -> Iterator[str]:
    """The arithmetic of the first layout."""
    best, room = found.ranked[0], found.room
    config, layout, time = best.config, best.layout, best.time
    assert time
    parts, numbers = best.memory.parts, parameter_count(args)
    yield f"{best.layout}, {' '.join(choices(best))}, in numbers:"
    yield (
        f"  weights, gradients, optimizer state: {numbers:,} parameters × {found.states / numbers:.3g} bytes "
        f"= {gib(found.states)}, which one {machine.name} {'has' if found.states < room else 'has not'}"
    )
    yield f"  the fullest rank (of the pipeline's {layout.pp} the {best.memory.rank + 1}.) has"
    for name, size in parts.items():
        if size:
            yield f"    {name:<20} {gib(size):>10}"
    yield f"    {'together':<20} {gib(best.memory.bytes):>10}  by arithmetic"
    if best.peak:
        yield f"    {'peak':<20} {gib(best.peak):>10}  by a fake step, of {gib(room)}"
    training = config.training
    tokens = training.global_batch_size * training.seq_len
    flops = model_flops(args, config.finetune, seq_len=training.seq_len)
    yield (
        f"  a step: {training.global_batch_size} samples × {training.seq_len} tokens × "
        f"{flops / 1e9:,.1f} GFLOP = {flops * tokens / 1e15:,.1f} PFLOP over {layout.world_size} GPUs: "
        f"{time.mfu * time.seconds:.3g} s at the peak"
    )
    yield f"    {'computed':<20} {time.compute:>8.3f} s  at its rates, what is recomputed too"
    for name, seconds in time.exposed.items():
        yield f"    {f'{name} waited for':<20} {seconds:>8.3f} s"
    if time.bubble:
        yield f"    {'pipeline':<20} {time.bubble:>8.3f} s  waiting for other ranks"
    yield f"    {'optimizer':<20} {time.optimizer:>8.3f} s"
    yield f"    {'together':<20} {time.seconds:>8.3f} s"


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:,.1f} GiB"
