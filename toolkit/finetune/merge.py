"""A model with LoRA or DoRA merged into its weights, computed while they are read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from toolkit.errors import DataError
from toolkit.finetune.parameters import TOKEN_ROWS, added_name, is_added, lora_targets
from toolkit.finetune.saved_adapter import Adapter
from toolkit.io.tensor_file import Region, whole
from toolkit.models.common.parameter_table import EMBEDDING, ParameterRow
from toolkit.models.parameters import adaptable
from toolkit.weights.source import StoredTensor, WeightSource
from toolkit.weights.views import View


class Merged(View):
    """The weights of ``base`` with ``adapter`` merged, in the base's dtypes.

    Updates are computed in at least fp32. Changed weights have at least the precision of ``at_least``,
    because updates are small relative to the weights.

    Raises:
        DataError: the adapter does not update weights.
    """

    def __init__(self, base: WeightSource, adapter: Adapter, *, at_least: torch.dtype | None = None):
        super().__init__(base)
        if adapter.options.adapter != "lora":
            raise DataError(
                f"{adapter.place} cannot be merged: {adapter.options.adapter} changes the attention; only "
                "LoRA changes weights\n  fix:  use it unmerged with llama-toolkit generate, chat and evaluate"
            )
        self.args = adapter.args
        self.adapter = adapter
        self.extra_paths = (adapter.place,)
        # A classifier's head has another shape than the LM head, which may be tied.
        replaced = {
            name: replace(base.tensors.get(name, base.tensors[EMBEDDING]), shape=stored.shape)
            for name, stored in adapter.tensors.items()
            if not is_added(name)
        }
        tensors = {**base.tensors, **replaced}
        rows = adaptable(adapter.args)
        self.updated = {rows[it].name: rows[it] for it in lora_targets(adapter.args, adapter.options)}
        if at_least is not None:
            for name in self.changed & tensors.keys():
                stored = tensors[name]
                tensors[name] = replace(stored, dtype=torch.promote_types(stored.dtype, at_least))
        self.tensors = tensors

    @property
    def changed(self) -> set[str]:
        """Names of the tensors that differ from the base."""
        rows = {EMBEDDING} if TOKEN_ROWS in self.adapter.values else set()
        return self.updated.keys() | rows | {name for name in self.adapter.values if not is_added(name)}

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        stored = self.tensors[name]
        if name in self.updated:
            tensor = self._merge(self.updated[name], stored, region)
        elif name == EMBEDDING and TOKEN_ROWS in self.adapter.values:
            tensor = self._with_token_rows(stored, region)
        elif name in self.adapter.values:
            tensor = self.adapter.read(name, region)
        else:
            return self.base.read(name, region, out)
        return tensor.to(stored.dtype) if out is None else out.copy_(tensor)

    def _with_token_rows(self, stored: StoredTensor, region: Region | None) -> Tensor:
        rows, columns = whole(stored.shape) if region is None else region
        table = self.base.read(EMBEDDING, (rows, columns)).to(stored.dtype)
        place = torch.tensor(self.adapter.options.trainable_token_indices) - rows.start
        own = (place >= 0) & (place < len(table))
        return table.index_copy(0, place[own], self.adapter.values[TOKEN_ROWS][own, columns].to(table.dtype))

    def _merge(self, row: ParameterRow, stored: StoredTensor, region: Region | None) -> Tensor:
        *experts, rows, columns = whole(stored.shape) if region is None else region
        lora, values = self.adapter.options.lora, self.adapter.values
        magnitude_R = values[added_name(row, "magnitude")][rows] if lora.use_dora else None
        # A row's norm needs all columns of the row.
        read = columns if magnitude_R is None else slice(0, stored.shape[-1])
        # If finetune.trainable selects the layer, the adapter contains its weight too.
        source: WeightSource = self.adapter if row.name in values else self.base
        weight = source.read(row.name, (*experts, rows, read))
        precise = torch.promote_types(weight.dtype, torch.float32)
        parts = (values[added_name(row, part)] for part in ("lora_a", "lora_b"))
        a, b = (part[tuple(experts)].to(precise) for part in parts)
        if experts:
            return torch.baddbmm(weight.to(precise), b[:, rows], a[..., read], alpha=lora.scale)
        merged = torch.addmm(weight.to(precise), b[rows], a[:, read], alpha=lora.scale)
        if magnitude_R is None:
            return merged
        ratio_R = magnitude_R.to(precise) / torch.linalg.vector_norm(merged, dim=1)
        return (merged * ratio_R[:, None])[:, columns].contiguous()
