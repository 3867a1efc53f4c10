"""Rules about moments in 8 bits, and what they take."""

from __future__ import annotations

import math

from toolkit.errors import Problem, divisors, first_few, join_or
from toolkit.finetune.parameters import Shapes, all_shapes, trained_names
from toolkit.optim.in_8bit import BLOCK, in_8bit
from toolkit.preflight.planned_run import PlannedRun, note, rule

_KEY = "optimizer.name"
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def _trained(run: PlannedRun) -> Shapes:
    """Shapes of what AdamW8bit would update; nothing where it is not asked for."""
    if run.config.optimizer.name != "AdamW8bit" or run.model is None:
        return {}
    shapes = all_shapes(run.model, run.config.finetune)
    return {name: shapes[name] for name in trained_names(shapes, run.model, run.config.finetune)}


@rule()
def some_moments_have_8_bits(run: PlannedRun) -> list[Problem]:
    """There is a matrix of whole blocks to train."""
    shapes = _trained(run)
    if not shapes or any(map(in_8bit, shapes.values())):
        return []
    rule = f"no matrix that is trained has rows of a multiple of {BLOCK} numbers, which share a magnitude"
    return [run.problem(_KEY, rule, 'set it to "AdamW"')]


@rule()
def shards_of_rows_are_blocks(run: PlannedRun) -> list[Problem]:
    """tp leaves a rank whole blocks of the rows that it cuts: those of wo and w2, and of what LoRA has before
    them."""
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
        f"cuts rows of {first_few(list(map(str, broken)), 2)} numbers within blocks of {BLOCK}, which "
        f"share a magnitude in {_KEY} = AdamW8bit"
    )
    fix = f'it can be {join_or(fitting)}, or {_KEY} "AdamW"'
    return [run.problem("parallelism.tensor_parallel_degree", rule, fix)]


@note
def moments_notes(run: PlannedRun) -> list[str]:
    """Tell how many moments have 8 bits, and how much all of them take."""
    sizes = {name: (in_8bit(shape), math.prod(shape)) for name, shape in _trained(run).items()}
    if not sizes:
        return []
    small = sum(size for fits, size in sizes.values() if fits)
    others, wide = sum(size for _, size in sizes.values()) - small, 2 * _BYTES[run.config.training.dtype]
    total = small * 2 * (1 + 4 / BLOCK) + others * wide
    return [
        f"{_KEY}: moments of {small:,} parameters have 8 bits, of {others:,} {run.config.training.dtype}: "
        f"{total / 2**30:.2f} GiB on all ranks together, where AdamW would take "
        f"{(small + others) * wide / 2**30:.2f}"
    ]
