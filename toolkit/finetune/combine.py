"""Combine LoRA adapters of one base model into one, whose update is the weighted sum of theirs.

The sum of updates of ranks R₁, R₂ … is exactly an update of rank R₁ + R₂ + …: the matrices A are stacked,
multiplied by weight and scale, and so are the matrices B. PEFT calls this the combination type "cat".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from toolkit.config.finetune import Finetune
from toolkit.errors import DataError
from toolkit.finetune.parameters import TOKEN_ROWS, added_name, is_added, lora_targets
from toolkit.finetune.saved_adapter import Adapter
from toolkit.models.parameters import adaptable


def combine(adapters: Sequence[tuple[Adapter, float]]) -> Adapter:
    """Return the sum of ``adapters``, which have one base model, multiplied by their weights.

    Raises:
        DataError: one of them is not a plain LoRA, or also contains trained weights or rows of the model.
    """
    for adapter, _ in adapters:
        lora = adapter.options.adapter == "lora" and not adapter.options.lora.use_dora
        if not lora or not all(is_added(name) and name != TOKEN_ROWS for name in adapter.values):
            what = "has more than updates of LoRA" if lora else "is not a LoRA, or has magnitudes (DoRA)"
            raise DataError(f"{adapter.place} cannot be combined with others: it {what}")
    first = adapters[0][0]
    rank = sum(adapter.options.lora.rank for adapter, _ in adapters)
    adapted = {target for adapter, _ in adapters for target in lora_targets(adapter.args, adapter.options)}
    targets = [name for name in adaptable(first.args) if name in adapted]
    values = {}
    for name in targets:
        row = adaptable(first.args)[name]
        *experts, rows, columns = row.shape
        a_parts, b_parts = [], []
        for adapter, weight in adapters:
            options = adapter.options.lora
            a = adapter.values.get(added_name(row, "lora_a"), torch.zeros(*experts, options.rank, columns))
            b = adapter.values.get(added_name(row, "lora_b"), torch.zeros(*experts, rows, options.rank))
            a_parts.append(a.float() * (weight * options.scale))
            b_parts.append(b.float())
        values[added_name(row, "lora_a")] = torch.cat(a_parts, -2)
        values[added_name(row, "lora_b")] = torch.cat(b_parts, -1)
    lora_options = {"rank": rank, "alpha": rank, "target_modules": targets}
    options_of_all = Finetune.model_validate({"adapter": "lora", "lora": lora_options})
    base = next((adapter.base for adapter, _ in adapters if "fingerprint" in (adapter.base or {})), None)
    return Adapter(first.place, first.args, options_of_all, values, base)
