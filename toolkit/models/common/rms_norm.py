"""RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), on CPUs a piece of the tokens at a time.

torch has a kernel of its own for CUDA; on a CPU its norm is four operators and its gradient about fifteen,
each of which reads and writes all tokens in fp32. A piece stays in the cache of a core from the first of them
to the last, and for backward the input alone is kept.

Shapes: T tokens, or heads of them, R of a piece, D numbers of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PIECE = 1 << 16
"""Numbers of a piece for each thread: three pieces in fp32 are less than a MiB."""
_FEWEST = 1 << 15
"""Numbers from which on pieces are faster than torch's operators."""
# Before 2.12 torch cannot split the backward of a function of parameters, as zero-bubble pipelines do.
_FUNCTIONS_OF_PARAMETERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm of the last dimension, of which torch.compile fuses the operators by itself.

    Attributes:
        in_pieces: whether a CPU computes a piece at a time.
    """

    in_pieces = True

    def forward(self, x: Tensor) -> Tensor:
        if (
            self.in_pieces
            and x.device.type == "cpu"
            and x.numel() >= _FEWEST
            and _FUNCTIONS_OF_PARAMETERS
            and not torch.compiler.is_compiling()
        ):
            return rms_norm(x, self.weight, self.eps)
        return super().forward(x)


# Operators of their own, so that a forecast sees one and knows what it keeps.
@torch.library.custom_op("toolkit::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight of the last dimension, in at least fp32, in the dtype of ``x``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    precise_D = weight_D.to(_precise(x))
    for x_RD, out_RD in _pieces(x, out):
        normal_RD, _ = _normal(x_RD, eps)
        out_RD.copy_(normal_RD.mul_(precise_D))
    return out


@torch.library.custom_op("toolkit::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    precise_D = weight_D.to(_precise(x))
    of_weight_D = torch.zeros_like(precise_D)
    for grad_RD, x_RD, out_RD in _pieces(grad, x, out):
        normal_RD, factor_R1 = _normal(x_RD, eps)
        precise_RD = grad_RD.to(precise_D.dtype, copy=True)
        along_RD = precise_RD * normal_RD
        of_weight_D += along_RD.sum(0)
        along_R1 = torch.mv(along_RD, precise_D).div_(-len(weight_D))[:, None]
        out_RD.copy_(precise_RD.mul_(precise_D).addcmul_(normal_RD, along_R1).mul_(factor_R1))
    return out, of_weight_D.to(weight_D.dtype)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows (R, D) of each, one piece after the other."""
    width = tensors[0].shape[-1]
    rows = max(1, _PIECE * torch.get_num_threads() // width)
    return zip(*(x.reshape(-1, width).split(rows) for x in tensors), strict=True)


def _precise(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _normal(x_RD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / √(mean(x²) + eps) in at least fp32, and the factor (R, 1)."""
    precise_RD = x_RD.to(_precise(x_RD), copy=True)
    squares_R1 = torch.linalg.vector_norm(precise_RD, dim=-1, keepdim=True).square_()
    factor_R1 = squares_R1.div_(x_RD.shape[1]).add_(eps).rsqrt_()
    return precise_RD.mul_(factor_R1), factor_R1


@rms_norm.register_fake
def _(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight_D)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight_D, ctx.eps = inputs
    ctx.save_for_backward(x, weight_D)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


rms_norm.register_autograd(_backward, setup_context=_keep_inputs)
