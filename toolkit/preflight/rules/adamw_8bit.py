"""Rules for 8-bit optimizer moments."""

from __future__ import annotations

import math

from toolkit.errors import Problem, divisors, first_few, join_or
from toolkit.finetune.parameters import Shapes, all_shapes, trained_names
from toolkit.optim.selection import BLOCK, in_8bit
from toolkit.preflight.planned_run import PlannedRun, note, rule

_KEY = "optimizer.name"
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def _trained(run: PlannedRun) -> Shapes:
    """Return the shapes of the parameters updated by AdamW8bit; empty for another optimizer."""
    if run.config.optimizer.name != "AdamW8bit" or run.model is None:
        return {}
    shapes = all_shapes(run.model, run.config.finetune)
    return {name: shapes[name] for name in trained_names(shapes, run.model, run.config.finetune)}


@rule()
def some_moments_have_8_bits(run: PlannedRun) -> list[Problem]:
    """Check that at least one trained matrix consists of whole blocks."""
    shapes = _trained(run)
    if not shapes or any(map(in_8bit, shapes.values())):
        return []
    rule = f"no trained matrix has rows of a multiple of {BLOCK} elements, which share a magnitude"
    return [run.problem(_KEY, rule, 'set it to "AdamW"')]


@rule()
def shards_of_rows_are_blocks(run: PlannedRun) -> list[Problem]:
    """Check that tensor parallelism splits the rows of wo, w2 and their LoRA inputs into whole blocks."""
    tp = run.config.parallelism.tensor_parallel_degree
    rows = {
        name: shape[1]
        for name, shape in _trained(run).items()
        if in_8bit(shape) and name.endswith((".wo.weight", ".w2.weight", ".wo.lora_a", ".w2.lora_a"))
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
    sizes = {name: (in_8bit(shape), math.prod(shape)) for name, shape in _trained(run).items()}
    if not sizes:
        return []
    small = sum(size for fits, size in sizes.values() if fits)
    others, wide = sum(size for _, size in sizes.values()) - small, 2 * _BYTES[run.config.training.dtype]
    total = small * 2 * (1 + 4 / BLOCK) + others * wide
    return [
        f"{_KEY}: moments of {small:,} parameters are stored in 8 bits, of {others:,} in "
        f"{run.config.training.dtype}: {total / 2**30:.2f} GiB over all ranks, compared with "
        f"{(small + others) * wide / 2**30:.2f} for AdamW"
    ]
