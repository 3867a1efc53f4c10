"""Rules for 8-bit optimizer moments."""

from __future__ import annotations

import math

from toolkit.errors import Problem, divisors, first_few, join_or
from toolkit.finetune.parameters import Shapes, all_shapes, trained_names
from toolkit.optim.selection import BLOCK, beyond_adamw
from toolkit.preflight.planned_run import PlannedRun, note, rule

_KEY = "optimizer.name"
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def _trained(run: PlannedRun) -> Shapes:
    """Return the shapes of the trained parameters; empty for another optimizer than AdamW8bit."""
    if run.config.optimizer.name != "AdamW8bit" or run.model is None:
        return {}
    shapes = all_shapes(run.model, run.config.finetune)
    return {name: shapes[name] for name in trained_names(shapes, run.model, run.config.finetune)}


def _in_8bit(run: PlannedRun) -> Shapes:
    """Return the shapes of those that have 8-bit moments."""
    options = run.config.optimizer
    return {name: shape for name, shape in _trained(run).items() if beyond_adamw(name, shape, options)}


@rule()
def some_moments_have_8_bits(run: PlannedRun) -> list[Problem]:
    """Check that at least one trained matrix consists of whole blocks."""
    if not _trained(run) or _in_8bit(run):
        return []
    rule = f"no trained matrix has rows of a multiple of {BLOCK} elements, which share a magnitude"
    return [run.problem(_KEY, rule, 'set it to "AdamW"')]


@rule()
def shards_of_rows_are_blocks(run: PlannedRun) -> list[Problem]:
    """Check that tensor parallelism splits the rows of wo, w2 and their LoRA inputs into whole blocks."""
    tp = run.config.parallelism.tensor_parallel_degree
    rows = {
        name: shape[1]
        for name, shape in _in_8bit(run).items()
        if name.endswith((".wo.weight", ".w2.weight", ".wo.lora_a", ".w2.lora_a"))
    }
    broken = sorted({size for size in rows.values() if size % (BLOCK * tp)})
    if not broken or run.model is None:
        return []
    fitting = divisors(math.gcd(run.model.n_kv_heads, *(size // BLOCK for size in rows.values())))
    rule = (
        f"splits rows of {first_few(list(map(str, broken)), 2)} elements within blocks of {BLOCK}, which "
        f"share a magnitude in {_KEY} = AdamW8bit"
    )
    fix = f'set it to {join_or(fitting)}, or {_KEY} to "AdamW"'
    return [run.problem("parallelism.tensor_parallel_degree", rule, fix)]


@note
def moments_notes(run: PlannedRun) -> list[str]:
    """Note the number of 8-bit moments and the memory of all moments."""
    shapes = _trained(run)
    if not shapes:
        return []
    small = sum(map(math.prod, _in_8bit(run).values()))
    others, wide = sum(map(math.prod, shapes.values())) - small, 2 * _BYTES[run.config.training.dtype]
    total = small * 2 * (1 + 4 / BLOCK) + others * wide
    return [
        f"{_KEY}: moments of {small:,} parameters are stored in 8 bits, of {others:,} in "
        f"{run.config.training.dtype}: {total / 2**30:.2f} GiB over all ranks, compared with "
        f"{(small + others) * wide / 2**30:.2f} for AdamW"
    ]
