"""LoRA and NF4 of stacked experts.

Each expert has an update of its own. The weights keep their names; those of w1 are ``w1_lora_a`` (E, R, in)
and ``w1_lora_b`` (E, out, R). Rows sorted by expert are multiplied by A, and then by B, in one grouped matmul
each, so an update costs rows · R · (in + out) multiplications. Adapters are placed like their experts: expert
parallelism shards E, tensor parallelism the width of every expert. Shapes are those of
:mod:`toolkit.models.common.moe`; R is the rank.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from toolkit.config.finetune import LoRA
from toolkit.finetune.lora import drop
from toolkit.finetune.nf4 import grouped_linear, new_packed
from toolkit.models.common.moe import Experts
from toolkit.models.common.plain_linear import check_plain

_WEIGHTS = ("w1", "w2", "w3")


class LoRAExperts(Experts):
    """Replacement of ``base``: the weights named in ``adapted`` have updates, x ↦ W x + s·B A dropout(x), and
    any of its weights may be in NF4."""

    tensor_placements = {
        "experts": {
            **{f"{name}_lora_a": "whole" for name in ("w1", "w3")},
            **{f"{name}_lora_b": "row" for name in ("w1", "w3")},
            "w2_lora_a": "last",
            "w2_lora_b": "whole",
        }
    }
    """Placements of the added parameters, by the tensor-parallel style of the layer."""

    def __init__(self, base: Experts, options: LoRA, adapted: Collection[str] = ()):
        nn.Module.__init__(self)
        self.args, self.num_experts, self.dispatch = base.args, base.num_experts, base.dispatch
        for name in (*_WEIGHTS, *(f"{it}_bias" for it in _WEIGHTS)):
            self.register_parameter(name, getattr(base, name))
        self.adapted = [name for name in _WEIGHTS if name in adapted]
        for name in self.adapted:
            weight = getattr(self, name)
            experts, rows, columns = weight.shape
            for part, shape in (("a", (options.rank, columns)), ("b", (rows, options.rank))):
                self.register_parameter(
                    f"{name}_lora_{part}", nn.Parameter(weight.new_empty(experts, *shape))
                )
        self.scale, self.dropout = options.scale, options.dropout
        self.enabled = True

    def _linear(self, name: str, x_MK: Tensor, ends_E: Tensor) -> Tensor:
        result = grouped_linear(x_MK, getattr(self, name), ends_E)
        if name not in self.adapted or not self.enabled:
            return result
        dropped = drop(x_MK, self.dropout) if self.dropout and self.training else x_MK
        inner_MR = grouped_linear(dropped, getattr(self, f"{name}_lora_a"), ends_E)
        update = grouped_linear(inner_MR, getattr(self, f"{name}_lora_b"), ends_E)
        return torch.add(result, update, alpha=self.scale)


def apply_lora_to_experts(model: nn.Module, targets: Collection[str], options: LoRA) -> None:
    """Add LoRA to the experts of ``model``, or of a stage of it, in place; ``targets`` are names of weights,
    such as layers.0.moe.experts.w1, and others are skipped.

    Raises:
        ConfigError: the experts of a target are not plain :class:`~toolkit.models.common.moe.Experts`.
    """
    for name, experts in _experts(model):
        if adapted := [it for it in _WEIGHTS if f"{name}.{it}" in targets]:
            key, fix = "finetune.lora.target_modules", "remove it from that list"
            check_plain(name, experts, key=key, value=options.target_modules, without=fix, kind=Experts)
            model.set_submodule(name, LoRAExperts(experts, options, adapted))


def apply_nf4_to_experts(model: nn.Module, options: LoRA) -> None:
    """Convert the frozen experts of ``model``, adapted or not, to NF4, on the meta device, in place.

    Raises:
        ConfigError: experts are neither plain :class:`~toolkit.models.common.moe.Experts` nor have LoRA.
    """
    for name, experts in _experts(model):
        if not isinstance(experts, LoRAExperts):
            key, fix = "finetune.lora.quantize_base", 'set it to "none"'
            check_plain(name, experts, key=key, value="nf4", without=fix, kind=Experts)
            experts = LoRAExperts(experts, options)
            model.set_submodule(name, experts)
        for weight in _WEIGHTS:
            setattr(experts, weight, new_packed(getattr(experts, weight)))


def _experts(model: nn.Module) -> list[tuple[str, Experts]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
