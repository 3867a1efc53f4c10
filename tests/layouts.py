"""The layouts in which a run must give its one curve, as data, and the rows that try them.

A factor has levels, and a level is what it sets in the configuration; the first is the plain one. Adding a
technique is a line of ``FACTORS``, and one of ``FORBIDDEN`` for what it excludes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Settings = dict[str, Any]
"""Values by dotted key."""
Row = dict[str, str]
"""A level for each factor, or for some."""
Pair = tuple[tuple[str, str], tuple[str, str]]


def _strategy(name: str, **more: Any) -> Settings:
    return {f"parallelism.{key}": value for key, value in {"sharding_strategy": name, **more}.items()}


_COMPILE = {"compile.enable": True, "compile.backend": "aot_eager"}
_PREFETCH = ("parallelism.fsdp_forward_prefetch", "parallelism.fsdp_backward_prefetch")
_SELECTIVE = {"activation_checkpoint.mode": "selective"}

FACTORS: dict[str, dict[str, Settings]] = {
    "strategy": {
        "FULL_SHARD": _strategy("FULL_SHARD"),
        "SHARD_GRAD_OP": _strategy("SHARD_GRAD_OP"),
        "NO_SHARD": _strategy("NO_SHARD"),
        "HYBRID_SHARD": _strategy("HYBRID_SHARD", data_parallel_replicate_degree=2),
        "HYBRID_SHARD_ZERO2": _strategy("HYBRID_SHARD_ZERO2", data_parallel_replicate_degree=2),
    },
    "reshard": {
        "by strategy": {},
        "always": {"parallelism.fsdp_reshard_after_forward": "always"},
        "over 2": {"parallelism.fsdp_reshard_after_forward": 2},
    },
    "ranks": {"2": {}, "4": {}, "1": {}},
    "accumulation": {"1": {}, "4": {}},
    "checkpointing": {
        "none": {},
        "full": {"activation_checkpoint.mode": "full"},
        "every 2nd": _SELECTIVE | {"activation_checkpoint.selective_ac_option": "2"},
        "op": _SELECTIVE | {"activation_checkpoint.selective_ac_option": "op"},
        "memory budget": {"activation_checkpoint.mode": "memory_budget"},
    },
    "compile": {"off": {}, "aot_eager": _COMPILE, "inductor": _COMPILE | {"compile.backend": "inductor"}},
    "wrap": {
        "block": {},
        # Units within units: the block keeps its norms, the root embedding and head.
        "class": {
            "parallelism.fsdp_wrap_policy": "class",
            "parallelism.fsdp_wrap_classes": ["TransformerBlock", "Attention", "FeedForward"],
        },
        # Blocks, embedding and head are large enough, the last norm and the parts of a block are not.
        "size": {"parallelism.fsdp_wrap_policy": "size", "parallelism.fsdp_min_num_params": 32_000},
    },
    "prefetch": {"default": {}, "2 and 2": dict.fromkeys(_PREFETCH, 2)},
    "reduce": {"each micro-batch": {}, "once a step": {"parallelism.fsdp_sync_each_batch": False}},
    "loss": {"chunks": {"training.loss_chunk_tokens": 128}, "whole": {"training.loss_chunk_tokens": 0}},
    "implementation": {name: {"optimizer.implementation": name} for name in ("fused", "foreach", "for-loop")},
    "update": {"after backward": {}, "in backward": {"optimizer.early_step_in_backward": True}},
    "clip": {"1": {}, "inf": {"training.max_norm": float("inf")}},
    "head": {"untied": {}, "tied": {"model.tie_embeddings": True}},
}

CURVES = ("clip", "head")
"""Factors that are part of what is trained: a row is compared with one process of the same levels."""

FORBIDDEN: list[dict[str, set[str]]] = [
    {"strategy": {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}, "ranks": {"1"}},
    {"strategy": {"SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"}, "reshard": {"always", "over 2"}},
    {"strategy": {"NO_SHARD", "HYBRID_SHARD"}, "reshard": {"over 2"}},  # shard groups of one and two ranks
    {"reshard": {"over 2"}, "ranks": {"1", "2"}},
    {"wrap": {"class"}, "compile": {"aot_eager", "inductor"}},  # units inside a compiled block
    {"checkpointing": {"memory budget"}, "compile": {"off"}},  # the compiler chooses
    {"update": {"in backward"}, "accumulation": {"4"}},
    {"update": {"in backward"}, "clip": {"1"}},
    {"reduce": {"once a step"}, "accumulation": {"1"}},  # would be the same as each micro-batch
]
"""Levels that no run may have together."""

COSTLY: list[dict[str, set[str]]] = [
    # Tens of seconds of C++ each: aot_eager traces the same, and stands for it but in ``INDUCTOR``.
    {"compile": {"inductor"}},
    # Many small collectives in each of many micro-batches.
    {"wrap": {"class"}, "ranks": {"4"}, "accumulation": {"4"}},
]
"""Levels that the rows of :func:`pairwise` do not have together, to save time, though each two of three."""

INDUCTOR: list[Row] = [
    {"strategy": "SHARD_GRAD_OP", "accumulation": "4", "checkpointing": "memory budget", "head": "tied"},
]
"""Levels that are not plain in the rows that inductor compiles, on two ranks."""
MORE_INDUCTOR: list[Row] = [
    {"strategy": "HYBRID_SHARD", "checkpointing": "op", "wrap": "size", "loss": "whole"},
]
"""Those that only ``-m exhaustive`` runs."""

SEED = 442
"""Tried out for few rows; any other gives as good a test."""


def plain_row() -> Row:
    return {factor: next(iter(levels)) for factor, levels in FACTORS.items()}


def reference_row(row: Row) -> Row:
    """One process that trains the same with nothing switched on."""
    return plain_row() | {"ranks": "1"} | {factor: row[factor] for factor in CURVES}


def references() -> list[Row]:
    """Rows that others are compared with: a row for each combination of the levels of ``CURVES``."""
    combined = product(*(FACTORS[factor] for factor in CURVES))
    return [reference_row(dict(zip(CURVES, levels, strict=True))) for levels in combined]


def settings(row: Row) -> Settings:
    """Settings of the configuration for the levels of a row."""
    return {key: value for factor, level in row.items() for key, value in FACTORS[factor][level].items()}


def allowed(row: Mapping[str, str], *, cheap: bool = False) -> bool:
    """Say if a row, complete or not, has nothing together that is forbidden, or if ``cheap`` costly."""
    rules = FORBIDDEN + COSTLY if cheap else FORBIDDEN
    return not any(all(row.get(factor) in levels for factor, levels in rule.items()) for rule in rules)


def exists(row: Row) -> bool:
    """Say if a row has a level of each factor, and no other."""
    return row.keys() == FACTORS.keys() and all(level in FACTORS[factor] for factor, level in row.items())


def name(row: Row) -> str:
    """The ranks, and what is not plain."""
    plain = plain_row()
    told = [
        f"{factor} {row[factor]}" for factor in FACTORS if factor != "ranks" and row[factor] != plain[factor]
    ]
    return ", ".join([f"ranks {row['ranks']}", *told])


def completed(row: Row, *, cheap: bool = False) -> Row | None:
    """An allowed row with these levels, the others as plain as they can be; None where there is none."""
    if not allowed(row, cheap=cheap):
        return None
    open_factor = next((factor for factor in FACTORS if factor not in row), None)
    if open_factor is None:
        return row
    tries = (completed(row | {open_factor: level}, cheap=cheap) for level in FACTORS[open_factor])
    return next((found for found in tries if found), None)


def pairs(row: Row) -> set[Pair]:
    """Each two levels that a row, complete or not, tries together."""
    return set(combinations(((factor, row[factor]) for factor in FACTORS if factor in row), 2))


def allowed_pairs() -> list[Pair]:
    """Each two levels of different factors that some allowed row has, but those with inductor."""
    levels = [(factor, level) for factor in FACTORS for level in FACTORS[factor] if level != "inductor"]
    return [pair for pair in combinations(levels, 2) if pair[0][0] != pair[1][0] and completed(dict(pair))]


def pairwise() -> list[Row]:
    """Rows, the same at every call, that try every allowed pair; they begin with the references and end with
    those of inductor.

    Greedy: a row starts from some pair that is not tried yet and takes, factor by factor in some order, a
    level that tries most new ones; chance decides by ``SEED``. At the end each level becomes plain again
    where no pair needs it, since plain ones cost least.
    """
    rows: list[Row] = []
    untried = dict.fromkeys(allowed_pairs())
    chance = random.Random(SEED)
    while untried:
        row = dict(chance.choice(list(untried)))
        factors = [factor for factor in FACTORS if factor not in row]
        chance.shuffle(factors)
        for factor in factors:
            choices = [level for level in FACTORS[factor] if completed(row | {factor: level}, cheap=True)]
            fresh = [len(untried.keys() & pairs(row | {factor: level})) for level in choices]
            most = max(fresh)
            row[factor] = chance.choice(
                [level for level, new in zip(choices, fresh, strict=True) if new == most]
            )
        rows.append(row)
        for pair in pairs(row):
            untried.pop(pair, None)
    return references() + _plainer(rows) + with_inductor(INDUCTOR)


def each_level(rows: Sequence[Row]) -> list[Row]:
    """The references, and as few of ``rows`` as have every level but inductor."""
    chosen = references()
    levels = {(factor, level) for factor in FACTORS for level in FACTORS[factor]} - {("compile", "inductor")}
    others = [row for row in rows if row["compile"] != "inductor"]
    while untried := levels - {level for row in chosen for level in row.items()}:
        chosen.append(max(others, key=lambda row: len(untried & set(row.items()))))
    return chosen


def with_inductor(rows: list[Row]) -> list[Row]:
    return [plain_row() | {"compile": "inductor"} | row for row in rows]


def every(factors: Sequence[str]) -> Iterator[Row]:
    """Each allowed row of the product of ``factors``; the levels of the others take turns."""
    others = [factor for factor in FACTORS if factor not in factors]
    turn = 0
    for chosen in product(*(FACTORS[factor] for factor in factors)):
        row = dict(zip(factors, chosen, strict=True))
        if not completed(row):
            continue
        for place, factor in enumerate(others):
            levels = list(FACTORS[factor])
            start = turn // (place + 1)
            ordered = (levels[(start + step) % len(levels)] for step in range(len(levels)))
            row[factor] = next(level for level in ordered if completed(row | {factor: level}))
        yield {factor: row[factor] for factor in FACTORS}
        turn += 1


def _plainer(rows: list[Row]) -> list[Row]:
    """The rows with each level moved towards the plain one as long as other rows try its pairs, and without
    the rows all of whose pairs others try."""
    tried = Counter(pair for row in rows for pair in pairs(row))
    kept = []
    for row in rows:
        for factor, levels in FACTORS.items():
            for level in levels:
                changed = row | {factor: level}
                lost, won = pairs(row) - pairs(changed), pairs(changed) - pairs(row)
                if level == row[factor] or (
                    allowed(changed, cheap=True) and all(tried[pair] > 1 for pair in lost)
                ):
                    tried.subtract(lost)
                    tried.update(won)
                    row = changed
                    break
        if all(tried[pair] > 1 for pair in pairs(row)):
            tried.subtract(pairs(row))
        else:
            kept.append(row)
    return kept
