"""Estimate the passes of FSDP units, and the exposed part of their gathers and reductions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from toolkit.planner.rates import Pass, Rates
from toolkit.planner.work import ModuleCost


@dataclass(frozen=True)
class UnitTime:
    """Passes of an FSDP unit, seconds of its collectives, and its trained elements."""

    forward: Pass
    backward: Pass
    gather: float
    reduce: float
    all_reduce: float
    in_backward: bool  # gathered again in backward
    trained: int
    stored: float  # trained elements of a rank's shard


def unit_time(
    part: ModuleCost, rates: Rates, *, fused: bool, float8: bool, in_backward: bool, reduced: int
) -> UnitTime:
    # An all-gather casts the fp32 shard to the compute dtype, copies it into a buffer and copies the gathered
    # parameters out. A reduction casts the gradients to elements of ``reduced`` bytes, usually fp32, and sums
    # the rank's shard.
    # Experts under expert parallelism are sharded over other ranks.
    gather = reduce = all_reduce = stored = 0.0
    for dimension, sizes in (("dp_shard", part.others), ("expert_fsdp", part.experts)):
        if not sizes.elements:
            continue
        ranks, gathered = rates.groups[dimension][0], sizes.gathered_bytes
        gradients = float(reduced * sizes.trained)
        shared = ranks > 1
        gather += rates.copy((4 * sizes.elements + (3 if shared else 1) * gathered) / ranks + 2 * gathered)
        gather += rates.send(dimension, "all_gather", gathered)
        reduce += rates.copy(1.5 * gradients + 3 * gradients / ranks * shared)
        reduce += rates.send(dimension, "reduce_scatter", gradients)
        all_reduce += rates.send("dp_replicate", "all_reduce", gradients / ranks)
        stored += sizes.trained / ranks
    run = partial(rates.run, fused=fused, float8=float8)
    return UnitTime(
        forward=run(part.forward),
        backward=sum_passes([run(part.recompute), run(part.backward)]),
        gather=gather,
        reduce=reduce,
        all_reduce=all_reduce,
        in_backward=in_backward,
        trained=part.trained,
        stored=stored,
    )


def accumulation(
    units: Sequence[UnitTime], rates: Rates, count: int, *, whole: bool, gradient: int, reduced: int
) -> Pass:
    """Return the time to accumulate the gradients of ``count`` micro-batches. They are ``whole`` if only the
    last micro-batch reduces them, otherwise shards. Gradients have elements of ``gradient`` bytes, and torch
    accumulates them in ``reduced`` bytes."""
    trained = sum(unit.trained for unit in units)
    if count == 1:
        size = 0.0
    elif whole:
        size = trained * (count - 1) * (gradient + 2 * reduced)
        size += trained * (gradient + reduced if gradient != reduced else 0)
    else:
        size = (count - 1) * 12 * sum(unit.stored for unit in units)
    return Pass(rates.copy(size), {})


def sum_passes(passes: Iterable[Pass], times: float = 1.0) -> Pass:
    compute, exposed = 0.0, dict[str, float]()
    for each in passes:
        compute += each.compute * times
        for dimension, seconds in each.exposed.items():
            exposed[dimension] = exposed.get(dimension, 0.0) + seconds * times
    return Pass(compute, exposed)


def exposed_gathers(units: Sequence[UnitTime]) -> float:
    """Return the exposed seconds of all-gathers in forward: the first unit's all-gather, and for each other
    unit the excess over the computation of the previous unit."""
    later = zip(units, units[1:], strict=False)
    return units[0].gather + sum(max(0.0, it.gather - before.forward.seconds) for before, it in later)


def exposed_in_backward(units: Sequence[UnitTime], *, gathers: bool, reduces: bool, replicas: bool) -> float:
    """Return the exposed seconds of communication in backward: each unit overlaps with the gather of the
    previous unit and the reduction of the next; the first unit's reduction overlaps with nothing."""
    exposed = pending = 0.0
    for place in reversed(range(len(units))):
        unit = units[place]
        before = units[place - 1] if place else None
        overlapped = pending + (before.gather if gathers and before and before.in_backward else 0.0)
        exposed += max(0.0, overlapped - unit.backward.seconds)
        pending = (unit.reduce if reduces else 0.0) + (unit.all_reduce if replicas else 0.0)
    return exposed + pending


def backward_communication(
    units: Sequence[UnitTime], *, gathers: bool, last: bool, each: bool
) -> dict[str, float]:
    """Return FSDP's exposed seconds in backward by dimension, for the ``last`` or an earlier micro-batch of a
    step."""
    without = exposed_in_backward(units, gathers=gathers, reduces=last or each, replicas=False)
    with_replicas = exposed_in_backward(units, gathers=gathers, reduces=last or each, replicas=last)
    return {"dp_shard": without, "dp_replicate": with_replicas - without}
