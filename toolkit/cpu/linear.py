"""Linear layers in fp32 by oneDNN on CPUs where MKL, which torch uses for fp32, lacks AVX-512.

MKL uses AVX-512 on Intel's CPUs only, and oneDNN on all. torch exposes oneDNN's fp32 matmul only as an
operator without gradients.

Shapes: M tokens, K inputs, N outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.compat import linear_of_reordered
from toolkit.hardware import processor

_FEWEST = 1 << 20
"""Minimum number of multiplications at which oneDNN is faster."""


@cache
def is_faster() -> bool:
    """Return whether this CPU has AVX-512 and is not Intel's, and torch has both libraries."""
    fields = processor()
    foreign = fields.get("vendor_id", ["GenuineIntel"]) != ["GenuineIntel"]
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return foreign and "avx512f" in fields.get("flags", []) and both


@cache
def _is_zen_4() -> bool:
    """Return whether MKL is faster if the first factor is transposed, as on AMD's Zen 4, whose AVX-512 units
    are half as wide."""
    fields = processor()
    return fields.get("vendor_id") == ["AuthenticAMD"] and fields.get("cpu family") == ["25"]


class OneDNNLinear(nn.Linear):
    """Replacement of ``linear``; also takes tensors that oneDNN is no faster for."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute F.linear, by oneDNN if it is faster for these tensors."""
    fp32 = x.dtype == torch.float32 == weight_NK.dtype
    if not fp32 or x.device.type != "cpu" or x[..., 0].numel() * weight_NK.numel() < _FEWEST:
        return F.linear(x, weight_NK, bias_N)
    return onednn_linear(x, weight_NK, bias_N)


def replace_linears(model: nn.Module) -> None:
    """Replace the plain linear layers of ``model``, and use :func:`linear` in its output head."""
    if (head := getattr(model, "output", None)) is not None:
        head.use_linear(linear)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear:
                setattr(parent, name, OneDNNLinear(module))


# A custom operator, so that the planner and activation checkpointing know what it computes.
@torch.library.custom_op("toolkit::onednn_linear", mutates_args=())
def onednn_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Compute x Wᵀ + bias, (..., N)."""
    return linear_of_reordered(x.contiguous(), weight_NK, bias_N, "none", [], "")


@onednn_linear.register_fake
def _(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight_NK.shape[0])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight_NK, _ = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_weight else None, weight_NK if needs_x else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight_NK = ctx.saved_tensors
    grad_MN = grad.flatten(0, -2)
    of_x = None if weight_NK is None else onednn_linear(grad, weight_NK.T, None)
    of_weight_NK = None if x is None else _weight_gradient(grad_MN, x.flatten(0, -2))
    return of_x, of_weight_NK, grad_MN.sum(0) if ctx.needs_input_grad[2] else None


def _weight_gradient(grad_MN: Tensor, x_MK: Tensor) -> Tensor:
    return grad_MN.T @ x_MK if _is_zen_4() else onednn_linear(grad_MN.T, x_MK.T, None)


onednn_linear.register_autograd(_backward, setup_context=_keep)
