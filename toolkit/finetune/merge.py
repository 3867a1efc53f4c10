"""A model with the updates of a LoRA or DoRA in its weights, computed as they are read."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from toolkit.errors import DataError
from toolkit.finetune.adapter import Adapter
from toolkit.finetune.parameters import is_added, lora_targets
from toolkit.io.tensor_file import Region, whole
from toolkit.models.common.table import EMBEDDING
from toolkit.weights.source import Stored, WeightSource
from toolkit.weights.views import View


class Merged(View):
    """The weights of ``base`` with those of ``adapter``, in the dtypes of the base: what the adapter updates
    is computed in at least fp32, what it replaces is taken from it. Both are in ``at_least`` where the base
    is in less, since what an adapter adds is small beside the weights.

    Raises:
        DataError: the adapter is no update of weights.
    """

    def __init__(self, base: WeightSource, adapter: Adapter, *, at_least: torch.dtype | None = None):
        super().__init__(base)
        if adapter.options.adapter != "lora":
            raise DataError(
                f"{adapter.place} cannot be merged: {adapter.options.adapter} adds to the attention, and "
                "LoRA alone to weights\n  fix:  tools.generate, chat and evaluate use it as it is"
            )
        self.args = adapter.args
        self.adapter = adapter
        self.beside = (adapter.place,)
        # A classifier's head is of another shape than the language model's, which may have none of its own.
        replaced = {
            name: replace(base.tensors.get(name, base.tensors[EMBEDDING]), shape=stored.shape)
            for name, stored in adapter.tensors.items()
            if not is_added(name)
        }
        tensors = {**base.tensors, **replaced}
        self.updated = {f"{module}.weight" for module in lora_targets(adapter.args, adapter.options)}
        if at_least is not None:
            for name in self.changed & tensors.keys():
                stored = tensors[name]
                tensors[name] = replace(stored, dtype=torch.promote_types(stored.dtype, at_least))
        self.tensors = tensors

    @property
    def changed(self) -> set[str]:
        """Names of the tensors that are not those of the base."""
        return self.updated | {name for name in self.adapter.values if not is_added(name)}

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        stored = self.tensors[name]
        if name in self.updated:
            found = self._updated(name.removesuffix(".weight"), stored, region)
        elif name in self.adapter.values:
            found = self.adapter.read(name, region)
        else:
            return self.base.read(name, region, out)
        return found.to(stored.dtype) if out is None else out.copy_(found)

    def _updated(self, module: str, stored: Stored, region: Region | None) -> Tensor:
        rows, columns = whole(stored.shape) if region is None else region
        lora, values = self.adapter.options.lora, self.adapter.values
        magnitude_R = values[f"{module}.magnitude"][rows] if lora.use_dora else None
        # The length of a row is that of all of it.
        read = columns if magnitude_R is None else slice(0, stored.shape[1])
        # A layer that finetune.trainable names too has a weight of its own under the update.
        own: WeightSource = self.adapter if f"{module}.weight" in values else self.base
        weight = own.read(f"{module}.weight", (rows, read))
        precise = torch.promote_types(weight.dtype, torch.float32)
        a, b = (values[f"{module}.{part}"].to(precise) for part in ("lora_a", "lora_b"))
        merged = torch.addmm(weight.to(precise), b[rows], a[:, read], alpha=lora.scale)
        if magnitude_R is None:
            return merged
        longer_R = magnitude_R.to(precise) / torch.linalg.vector_norm(merged, dim=1)
        return (merged * longer_R[:, None])[:, columns].contiguous()
