"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) on CPUs, one chunk of tokens at a time.

torch has a fused kernel only for CUDA. On a CPU, its norm takes four operators and its gradient about
fifteen, each of which reads and writes all tokens in fp32. Here a chunk stays in a core's cache throughout.
For backward, the input and one value per token are saved.

Shapes: T tokens, or heads of tokens, R of them per chunk, D elements each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from toolkit import cpu
from toolkit.compat import weight_norm_backward

_PIECE = 1 << 16
"""Elements of a chunk per thread: three chunks in fp32 take less than 1 MiB."""
_FEWEST = 1 << 15
"""Minimum number of elements at which chunks are faster than torch's operators."""
# Before 2.12, torch cannot split the backward of an autograd function of parameters (zero-bubble pipelines).
_FUNCTIONS_OF_PARAMETERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def takes(x: Tensor) -> bool:
    """Return whether the norm of ``x`` is computed in chunks; torch.compile fuses torch's operators
    instead."""
    return (
        not torch.compiler.is_compiling()
        and cpu.is_enabled()
        and x.device.type == "cpu"
        and x.numel() >= _FEWEST
        and _FUNCTIONS_OF_PARAMETERS
    )


# Custom operators, so that the planner sees a single operator and knows what it saves.
@torch.library.custom_op("toolkit::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return two tensors: x / √(mean(x²) + eps) · weight over the last dimension, computed in at least fp32
    and returned in the dtype of ``x``; and √(Σx² + D·eps) of each token, (T, 1)."""
    out, norm_T1 = _like(x), _norms(x)
    precise_D = weight_D.to(norm_T1.dtype)
    for x_RD, out_RD, norm_R1 in _pieces(x, out, norm_T1):
        precise_RD = x_RD.to(norm_R1.dtype)
        torch.linalg.vector_norm(precise_RD, dim=-1, keepdim=True, out=norm_R1)
        norm_R1.square_().add_(x_RD.shape[1] * eps).sqrt_()
        result_RD = out_RD if out_RD.dtype == norm_R1.dtype else precise_RD
        torch.mul(precise_RD, x_RD.shape[1] ** 0.5 / norm_R1, out=result_RD).mul_(precise_D)
        if result_RD is not out_RD:
            out_RD.copy_(result_RD)
    return out, norm_T1


@torch.library.custom_op("toolkit::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, norm_T1: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the weight."""
    out, scale_T1 = _like(x), torch.full_like(norm_T1, x.shape[-1] ** 0.5)
    precise_D = weight_D.to(norm_T1.dtype)
    of_weight_D = torch.zeros_like(precise_D)
    for grad_RD, x_RD, out_RD, norm_R1, scale_R1 in _pieces(grad, x, out, norm_T1, scale_T1):
        grad_RD, x_RD = grad_RD.to(precise_D.dtype), x_RD.to(precise_D.dtype)
        product_RD = grad_RD * x_RD
        of_weight_D += product_RD.mul_(scale_R1 / norm_R1).sum(0)
        torch.mul(grad_RD, precise_D, out=product_RD)
        # The gradient of scale · x / norm, which is weight normalization: its kernel takes one pass.
        of_x_RD, _ = weight_norm_backward(product_RD, x_RD, scale_R1, norm_R1, 0)
        out_RD.copy_(of_x_RD)
    return out, of_weight_D.to(weight_D.dtype)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _norms(x: Tensor) -> Tensor:
    """Allocate one value per token, in at least fp32."""
    precise = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.numel() // x.shape[-1], 1, dtype=precise)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching chunks of rows (R, D) of the tensors."""
    width = tensors[0].shape[-1]
    rows = max(1, _PIECE * torch.get_num_threads() // width)
    return zip(*(x.reshape(-1, x.shape[-1]).contiguous().split(rows) for x in tensors), strict=True)


@rms_norm.register_fake
def _(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x), _norms(x)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight_D: Tensor, norm_T1: Tensor) -> tuple[Tensor, Tensor]:
    return _like(x), torch.empty_like(weight_D)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(grad, *ctx.saved_tensors), None


rms_norm.register_autograd(_backward, setup_context=_keep)
