"""LoRA and DoRA: linear layers with a low-rank update beside the weight, which is not trained.

The layer keeps its ``weight`` and its place; ``lora_a`` (R, in) and ``lora_b`` (out, R) are parameters of its
own, so that FSDP, tensor parallelism and checkpoints treat them as any other. With DoRA the sum of weight and
update has rows of the length ``magnitude`` (out,); their present length is a constant in backward, as in
section 4.3 of the paper (arXiv:2402.09353).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.compat import unsafe_view
from toolkit.config.finetune import LoRA
from toolkit.distributed.dtensor import local_part
from toolkit.finetune.nf4 import dequantize, linear
from toolkit.models.common.plain_linear import check_plain


class LoRALinear(nn.Linear):
    """x ↦ W x + s·B A dropout(x), or with ``magnitude`` each row m / ‖W + s·B A‖ times as long.

    Takes the place of ``base``. Tensor parallelism may leave each rank a part of its features.
    """

    tensor_placements = {
        "column": {"lora_a": "whole", "lora_b": "column", "magnitude": "column"},
        "row": {"lora_a": "row", "lora_b": "whole", "magnitude": "whole"},
    }
    """By the style that tensor parallelism gives the layer: how the added parameters lie on its ranks."""

    def __init__(self, base: nn.Linear, options: LoRA):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=base.weight.device, dtype=base.weight.dtype))

        self.lora_a = new(options.rank, self.in_features)
        self.lora_b = new(self.out_features, options.rank)
        self.magnitude = new(self.out_features) if options.use_dora else None
        self.scale = options.scale
        self.dropout = options.dropout
        self.enabled = True
        # Adds up over the ranks that have a part of each row.
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda squares: squares

    def forward(self, x: Tensor) -> Tensor:
        result = linear(x, self.weight, self.bias)
        if not self.enabled:
            return result
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        inner = F.linear(dropped, self.lora_a).flatten(0, -2)
        if self.magnitude is None:  # scaled and added within the product, not in passes of their own
            sums = torch.addmm(result.flatten(0, -2), inner, self.lora_b.T, alpha=self.scale)
            # A view that autograd does not know for one: FSDP warns of a unit that returns one.
            return unsafe_view(sums, result.shape)
        update = (inner @ self.lora_b.T * self.scale).view_as(result)
        longer = self.magnitude / self._row_norms().to(self.magnitude.dtype)
        return result + linear(dropped, self.weight) * (longer - 1) + update * longer

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        merged = _numbers(self.weight, self.lora_b.dtype) + self.lora_b @ self.lora_a * self.scale
        precise = torch.promote_types(merged.dtype, torch.float32)
        return self.sum_over_ranks(merged.to(precise).square().sum(dim=1)).sqrt()

    @torch.no_grad()
    def reset_magnitude(self) -> None:
        """Set the magnitudes to the lengths of the weight's rows, sharded or not, once it is loaded."""
        if self.magnitude is None:
            return
        weight = self.weight.detach()
        if isinstance(weight, DTensor) and isinstance(self.magnitude, DTensor):
            # Whole rows, whose lengths have the same bits on any mesh.
            weight = weight.redistribute(placements=self.magnitude.placements).to_local()
        magnitude, _ = local_part(self.magnitude)
        magnitude.copy_(torch.linalg.vector_norm(_numbers(weight, magnitude.dtype), dim=1))


def _numbers(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(weight, dtype) if weight.dtype == torch.uint8 else weight.to(dtype)


def apply_lora(model: nn.Module, targets: Iterable[str], options: LoRA) -> None:
    """Put updates beside the linear layers called ``targets``, in place; other stages' are passed over.

    Raises:
        ConfigError: one of them is no plain linear layer.
    """
    modules = dict(model.named_modules())
    for name in targets:
        if name in modules:
            check_plain(
                name,
                modules[name],
                key="finetune.lora.target_modules",
                value=options.target_modules,
                without="name the others",
            )
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, LoRALinear(modules[name], options))
