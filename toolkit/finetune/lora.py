"""LoRA and DoRA: linear layers with a low-rank update of a frozen weight.

The layer keeps its ``weight`` and its name; ``lora_a`` (R, in) and ``lora_b`` (out, R) are additional
parameters, which FSDP, tensor parallelism and checkpoints treat like any other. With DoRA, rows of the
updated weight are scaled to the norm ``magnitude`` (out,). The rows' current norm is treated as a constant in
backward, as in section 4.3 of the paper (arXiv:2402.09353).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.compat import unsafe_view
from toolkit.config.finetune import LoRA
from toolkit.distributed.dtensor import shard_and_offset
from toolkit.finetune.nf4 import dequantize, linear
from toolkit.hardware import device_type
from toolkit.models.common.plain_linear import check_plain


class LoRALinear(nn.Linear):
    """Replacement of ``base``: x ↦ W x + s·B A dropout(x); with ``magnitude``, each row is multiplied by
    m / ‖W + s·B A‖.

    Tensor parallelism may shard its features.
    """

    tensor_placements = {
        "column": {"lora_a": "whole", "lora_b": "column", "magnitude": "column"},
        "row": {"lora_a": "row", "lora_b": "whole", "magnitude": "whole"},
    }
    """Placements of the added parameters, by the tensor-parallel style of the layer."""

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
        # Sums over the ranks that have shards of each row.
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda squares: squares

    def forward(self, x: Tensor) -> Tensor:
        result = linear(x, self.weight, self.bias)
        if not self.enabled:
            return result
        dropped = drop(x, self.dropout) if self.dropout and self.training else x
        inner = F.linear(dropped, self.lora_a).flatten(0, -2)
        if self.magnitude is None:  # addmm fuses scaling and addition into the matmul
            sums = torch.addmm(result.flatten(0, -2), inner, self.lora_b.T, alpha=self.scale)
            # FSDP warns about a unit that returns what autograd tracks as a view.
            return unsafe_view(sums, result.shape)
        update = (inner @ self.lora_b.T * self.scale).view_as(result)
        ratio = self.magnitude / self._row_norms().to(self.magnitude.dtype)
        return result + linear(dropped, self.weight) * (ratio - 1) + update * ratio

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        merged = _dequantized(self.weight, self.lora_b.dtype) + self.lora_b @ self.lora_a * self.scale
        precise = torch.promote_types(merged.dtype, torch.float32)
        return self.sum_over_ranks(merged.to(precise).square().sum(dim=1)).sqrt()

    @torch.no_grad()
    def reset_from_weight(self) -> None:
        """Set the magnitudes to the norms of the rows of the loaded weight, which may be sharded."""
        if self.magnitude is None:
            return
        weight = self.weight.detach()
        if isinstance(weight, DTensor) and isinstance(self.magnitude, DTensor):
            # With full rows, the norms are bitwise equal on any mesh.
            weight = weight.redistribute(placements=self.magnitude.placements).to_local()
        magnitude, _ = shard_and_offset(self.magnitude)
        magnitude.copy_(torch.linalg.vector_norm(_dequantized(weight, magnitude.dtype), dim=1))


def drop(x: Tensor, probability: float) -> Tensor:
    """Compute F.dropout in training."""
    if device_type(x.device.type) == "cuda":  # as F.dropout does there; a dry run counts its mask
        return torch.native_dropout(x, probability, True)[0]
    return F.dropout(x, probability)


def _dequantized(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(weight, dtype) if weight.dtype == torch.uint8 else weight.to(dtype)


def apply_lora(model: nn.Module, targets: Iterable[str], options: LoRA) -> None:
    """Replace the linear layers named ``targets`` by LoRA layers, in place; layers of other stages are
    skipped.

    Raises:
        ConfigError: a target is not a plain torch.nn.Linear.
    """
    modules = dict(model.named_modules())
    for name in targets:
        if name in modules:
            check_plain(
                name,
                modules[name],
                key="finetune.lora.target_modules",
                value=options.target_modules,
                without="remove it from that list",
            )
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, LoRALinear(modules[name], options))
