"""Weights in the layout in which a CPU multiplies them, in place of rows.

oneDNN reorders a bf16 matrix in each call, which for a few rows of input costs as much as the product: with
matrices reordered once, products take about half the time (benchmarks/generation.py). The operations are
those that torch's compiler uses for frozen weights on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit.models.common.decoder import Decoder
from toolkit.models.common.lm_head import OutputHead

_ops = torch.ops.mkldnn
_ROWS = 8
"""Rows of inputs for which the layout is chosen; others are multiplied too."""


def can_pack(model: Decoder) -> bool:
    """Say if ``model`` has plain bf16 tensors, not packed yet, on a CPU whose instructions oneDNN uses."""
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    plain &= all(module.weight is not None for module in model.modules() if isinstance(module, nn.Linear))
    first = next(model.parameters())
    return (
        plain
        and first.device.type == "cpu"
        and first.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@torch.no_grad()
def pack(model: Decoder) -> None:
    """Reorder the matrices of ``model`` in place: its forward stays, without gradients, and its blocks lose
    their matrices. The head keeps its own beside the reordered copy, for losses and a tied embedding."""
    for block in model.layers.values():
        for module in block.modules():
            if isinstance(module, nn.Linear):
                _pack_linear(module)
    if model.output is not None:
        _pack_head(model.output, model)


def _reordered(weight: Tensor) -> Tensor:
    return _ops._reorder_linear_weight(weight.detach(), _ROWS)


def _product(x: Tensor, packed: Tensor) -> Tensor:
    return _ops._linear_pointwise(x, packed, None, "none", [], "")


class _PackedLinear(nn.Linear):
    """A linear layer that has its matrix in oneDNN's order alone."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return _product(input, self.packed)


def _pack_linear(module: nn.Linear) -> None:
    packed = _reordered(module.weight)
    module.register_parameter("weight", None)
    module.__class__ = _PackedLinear
    module.packed = packed


def _pack_head(head: OutputHead, model: Decoder) -> None:
    tied = model.tok_embeddings.weight if model.args.tie_embeddings and model.tok_embeddings else head.weight
    assert tied is not None
    packed = _reordered(tied)
    head.logits = lambda h, weight: _product(h, packed)
