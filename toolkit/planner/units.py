"""FSDP's units: their passes, and what of their gathers and reductions runs beside nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from toolkit.planner.rates import Pass, Rates
from toolkit.planner.work import Piece


@dataclass(frozen=True)
class Unit:
    """Passes of an FSDP unit, seconds of its collectives, and its numbers that are trained."""

    forward: Pass
    backward: Pass
    gather: float
    reduce: float
    all_reduce: float
    in_backward: bool  # gathered there again
    trained: int


def unit_of(
    piece: Piece, rates: Rates, *, fused: bool, float8: bool, in_backward: bool, reduced: int
) -> Unit:
    # A gather reads the fp32 part that is stored, writes it as it is computed in, then where all can read it,
    # and puts the whole together; a reduction makes numbers of so many ``reduced`` bytes of the gradients,
    # mostly fp32, and adds up its part of all ranks'. Each unit is gathered twice and reduced once.
    ranks, gathered = rates.groups["dp_shard"][0], piece.gathered_bytes
    gradients = float(reduced * piece.trained)
    shared = ranks > 1
    gather = rates.copy((4 * piece.numbers + (3 if shared else 1) * gathered) / ranks + 2 * gathered)
    reduce = rates.copy(1.5 * gradients + 3 * gradients / ranks * shared)
    run = partial(rates.run, fused=fused, float8=float8)
    return Unit(
        forward=run(piece.forward),
        backward=added([run(piece.again), run(piece.backward)]),
        gather=gather + rates.send("dp_shard", "all_gather", gathered),
        reduce=reduce + rates.send("dp_shard", "reduce_scatter", gradients),
        all_reduce=rates.send("dp_replicate", "all_reduce", gradients / ranks),
        in_backward=in_backward,
        trained=piece.trained,
    )


def accumulating(
    units: Sequence[Unit], rates: Rates, count: int, *, whole: bool, gradient: int, reduced: int
) -> Pass:
    """The sums of the gradients of ``count`` micro-batches: of this rank's part of what each reduces, or,
    where the last one alone reduces, of ``whole`` ones, whose numbers of ``gradient`` bytes torch adds up in
    ``reduced`` bytes."""
    trained = sum(unit.trained for unit in units)
    if count == 1:
        size = 0.0
    elif whole:
        size = (count - 1) * (gradient + 2 * reduced) + (gradient + reduced if gradient != reduced else 0)
    else:
        size = (count - 1) * 12 / rates.groups["dp_shard"][0]
    return Pass(rates.copy(trained * size), {})


def added(passes: Iterable[Pass], times: float = 1.0) -> Pass:
    compute, exposed = 0.0, dict[str, float]()
    for each in passes:
        compute += each.compute * times
        for dimension, seconds in each.exposed.items():
            exposed[dimension] = exposed.get(dimension, 0.0) + seconds * times
    return Pass(compute, exposed)


def gathering(units: Sequence[Unit]) -> float:
    """Seconds of gathers that a forward waits for: the first unit's, and of the others what is longer than
    the unit before takes."""
    later = zip(units, units[1:], strict=False)
    return units[0].gather + sum(max(0.0, it.gather - before.forward.seconds) for before, it in later)


def reducing(units: Sequence[Unit], *, gathers: bool, reduces: bool, replicas: bool) -> float:
    """Seconds of communication that a backward waits for: beside a unit the one before it is gathered and the
    one after it reduced; the first unit's reduction is beside nothing."""
    exposed = owed = 0.0
    for place in reversed(range(len(units))):
        unit = units[place]
        before = units[place - 1] if place else None
        beside = owed + (before.gather if gathers and before and before.in_backward else 0.0)
        exposed += max(0.0, beside - unit.backward.seconds)
        owed = (unit.reduce if reduces else 0.0) + (unit.all_reduce if replicas else 0.0)
    return exposed + owed


def around_backward(units: Sequence[Unit], *, gathers: bool, last: bool, each: bool) -> dict[str, float]:
    """Seconds that a backward waits for FSDP, by dimension, in the ``last`` one of a step or another."""
    without = reducing(units, gathers=gathers, reduces=last or each, replicas=False)
    with_replicas = reducing(units, gathers=gathers, reduces=last or each, replicas=last)
    return {"dp_shard": without, "dp_replicate": with_replicas - without}
