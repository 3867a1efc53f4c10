"""Switch between several adapters on one loaded base model.

LoRA updates are merged into the weights, so they add no cost per token. For another adapter, only changed
weights are read again. Adapters in the attention become additional modules: their heads are sharded over the
tp group, and the rest, which is small, is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from toolkit.finetune.apply import apply_to_attention
from toolkit.finetune.merge import Merged
from toolkit.finetune.parameters import IN_ATTENTION
from toolkit.finetune.saved_adapter import Adapter
from toolkit.models.common.decoder import Decoder
from toolkit.weights.load import load_weights
from toolkit.weights.source import WeightSource
from toolkit.weights.views import Subset


class Adapters:
    """Adapters by name on the weights of ``base``; ``selected`` is the active one, or None for the base."""

    def __init__(self, base: WeightSource, adapters: Mapping[str, Adapter]):
        self.base, self.adapters = base, adapters
        self.selected: str | None = None

    def load(self, model: Decoder, name: str | None, tp: DeviceMesh | None) -> None:
        """Load base and adapter into ``model``, whose parameters are uninitialized. Collective."""
        load_weights(self._source(name), dict([*model.named_parameters(), *model.named_buffers()]))
        self._attach(model, name, tp)

    def select(self, model: Decoder, name: str | None, tp: DeviceMesh | None) -> None:
        """Switch ``model`` from the ``selected`` adapter to another. Collective.

        Raises:
            DataError, CheckpointError: the weights can no longer be read.
        """
        changed = self._changed(self.selected) | self._changed(name)
        parameters = {key: it for key, it in model.named_parameters() if key in changed}
        for block in model.layers.values():
            attention: Any = block.attention
            attention.adapter = None
        if parameters:
            load_weights(Subset(self._source(name), parameters), parameters)
        self._attach(model, name, tp)

    def _merges(self, name: str | None) -> bool:
        return name is not None and self.adapters[name].options.adapter == "lora"

    def _source(self, name: str | None) -> WeightSource:
        if name is None or not self._merges(name):
            return self.base
        return Merged(self.base, self.adapters[name], at_least=torch.float32)

    def _changed(self, name: str | None) -> set[str]:
        source = self._source(name)
        return source.changed if isinstance(source, Merged) else set()

    def _attach(self, model: Decoder, name: str | None, tp: DeviceMesh | None) -> None:
        if name is not None and not self._merges(name):
            attach(model, self.adapters[name], tp)
        self.selected = name


def attach(model: Decoder, adapter: Adapter, tp: DeviceMesh | None = None) -> None:
    """Add the modules of an attention ``adapter`` to ``model``, with their values."""
    like = next(model.parameters())
    apply_to_attention(model, adapter.args, adapter.options)
    for layer, block in model.layers.items():
        attention: Any = block.attention
        module = attention.adapter
        if module is None:
            continue
        for part in dict(module.named_parameters()):
            value = adapter.values[f"layers.{layer}{IN_ATTENTION}{part}"]
            if tp is not None and module.tensor_placements["adapter"][part] == "column":
                value = value.chunk(tp.size())[tp.get_local_rank()]
            value = value.to(device=like.device, dtype=like.dtype)
            module.register_parameter(part, nn.Parameter(value.contiguous(), requires_grad=False))
