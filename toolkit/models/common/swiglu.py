"""SwiGLU: silu(gate) · up, of equal shapes (Shazeer 2020, arXiv:2002.05202), and a variant with limits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit import fused
from toolkit.fused import Fused


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) · up. The fused version saves only the arguments and recomputes silu in backward."""
    if fused.is_enabled("swiglu") and not torch.compiler.is_compiling():
        return _SwiGLU.apply(gate, up)
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float, alpha: float) -> Tensor:
    """Compute gate · sigmoid(alpha · gate) · (up + 1), with gate at most ``limit`` and up within ± ``limit``
    (gpt-oss, arXiv:2508.10925)."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _forward(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _backward(grad, *ctx.saved_tensors)


def _gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


# Dynamic, because the number of an expert-parallel rank's rows changes with each step.
_forward = Fused("swiglu", lambda gate, up: F.silu(gate) * up, dynamic=True)
_backward = Fused("swiglu", _gradients, dynamic=True)
