"""PiSSA: LoRA that starts at the weights' principal singular vectors (Meng et al. 2024, arXiv:2404.02948).

A weight W = U S V is divided into B A = U_R S_R V_R, its part of rank R, which is trained, and the residual
W − B A, which is frozen. The residual is a model of its own and the adapter an ordinary LoRA of it, so that
training, checkpoints, NF4 and exports need nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from toolkit.config.finetune import Finetune
from toolkit.errors import DataError
from toolkit.finetune.parameters import added_name, lora_targets
from toolkit.finetune.saved_adapter import Adapter
from toolkit.models.parameters import adaptable
from toolkit.weights.source import WeightSource

_POWER_ITERATIONS = 16


def principal_adapter(
    base: WeightSource,
    *,
    rank: int,
    target_modules: Sequence[str],
    progress: Callable[[int], object],
) -> Adapter:
    """Return the LoRA whose update is the part of ``rank`` of each target's weight, in fp32.

    ``progress`` is called with the bytes of each weight that was decomposed.

    Raises:
        DataError: there are no such targets, or ``rank`` exceeds the rank of a weight.
    """
    lora = {"rank": rank, "alpha": rank, "target_modules": list(target_modules)}
    options = Finetune.model_validate({"adapter": "lora", "lora": lora})
    rows, targets = adaptable(base.args), lora_targets(base.args, options)
    if not targets:
        raise DataError(f"{base.place} has no linear layers named {', '.join(target_modules)}")
    smallest = min((rows[it] for it in targets), key=lambda row: min(row.shape[-2:]))
    if rank > min(smallest.shape[-2:]):
        size = " × ".join(map(str, smallest.shape[-2:]))
        raise DataError(f"{smallest.name} is {size}: its rank is below {rank}")
    values = {}
    for row in (rows[it] for it in targets):
        weight = base.read(row.name).float()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            # More vectors than used, because the last ones are the least exact (Halko et al. 2009).
            q = min(2 * rank + 16, *row.shape[-2:])
            u, s, v = torch.svd_lowrank(weight, q, niter=_POWER_ITERATIONS)
        root = s[..., None, :rank].sqrt()
        values[added_name(row, "lora_a")] = (v[..., :rank] * root).mT.contiguous()
        values[added_name(row, "lora_b")] = u[..., :rank] * root
        progress(base.tensors[row.name].nbytes)
    return Adapter(base.place, base.args, options, values)
