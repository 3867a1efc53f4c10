"""NF4: frozen weights of linear layers in 4 bits, of which each is one of 16 levels times the scale of its
block (QLoRA: Dettmers et al. 2023, arXiv:2305.14314).

A block is 64 numbers of a row, its scale the largest magnitude among them, in fp32. Levels, codes and scales
are those of bitsandbytes, bit for bit. They are stored block after block, two codes a byte and then the four
bytes of the scale: 4.5 bits a number, in one tensor of bytes (out, in / 64 · 36) that has the weight's name.
It is cut by rows, or by columns between blocks, as any other parameter, and no precision policy casts it.

A layer makes numbers of it for the time of a product, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.distributed.dtensor import local_part
from toolkit.finetune.parameters import NF4_BLOCK as BLOCK
from toolkit.fused import Fused
from toolkit.models.common.plain_linear import check_plain

BLOCK_BYTES = BLOCK // 2 + 4
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, zero among them: appendix E of the paper."""
_AT_ONCE = 1 << 23
"""Numbers that are made in fp32 at once."""


def quantize(weight: Tensor) -> Tensor:
    """The bytes (R, C / 64 · 36) of rows (R, C)."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=-1, keepdim=True)
    units = blocks * (1 / scales.clamp(min=1e-38))  # bitsandbytes' rounding, where a quotient's differs
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = torch.bucketize(units, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    pairs = codes[..., ::2] << 4 | codes[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], dim=-1).flatten(-2)


# This and the products below are operators of their own: where torch.compile sees that forward and backward
# make the same numbers, it keeps those of all layers from one to the other.
@torch.library.custom_op("toolkit::nf4_dequantize", mutates_args=())
def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers (R, C) of the bytes (R, C / 64 · 36): products in fp32, then of ``dtype``."""
    levels = _pairs_of_levels(packed.device)
    if _elements.applies_to(packed):
        return _elements(packed, levels, dtype)
    rows, width = packed.shape
    columns = width // BLOCK_BYTES * BLOCK
    elements = packed.new_empty(rows, columns, dtype=dtype)
    step = max(1, _AT_ONCE // columns)
    for some, these in zip(elements.split(step), packed.split(step), strict=True):
        some.copy_(_elements(these, levels, torch.float32))
    return elements


def _elements_of_rows(packed: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = packed.unflatten(-1, (-1, BLOCK_BYTES))[..., : BLOCK // 2]
    scales = packed.view(torch.float32).unflatten(-1, (-1, BLOCK_BYTES // 4))[..., BLOCK // 8 :]
    return levels[pairs.int()].flatten(-2).mul_(scales).flatten(-2).to(dtype)


_elements = Fused("nf4", _elements_of_rows)


@dequantize.register_fake
def _(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(packed.shape[0], packed.shape[1] // BLOCK_BYTES * BLOCK, dtype=dtype)


@cache
def _pairs_of_levels(device: torch.device) -> Tensor:
    """The two levels (256, 2) that each byte stands for."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)


# Products


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of ``x`` and a weight, which may be one of bytes."""
    if weight.dtype != torch.uint8:
        return F.linear(x, weight, bias)
    product = nf4_linear(x, weight)
    return product if bias is None else product + bias


@torch.library.custom_op("toolkit::nf4_linear", mutates_args=())
def nf4_linear(x: Tensor, packed: Tensor) -> Tensor:
    """x Wᵀ, for the weight W of the bytes; only these are kept for backward."""
    return F.linear(x, dequantize(packed, x.dtype))


@torch.library.custom_op("toolkit::nf4_linear_backward", mutates_args=())
def nf4_linear_backward(grad: Tensor, packed: Tensor) -> Tensor:
    """The gradient of x."""
    return grad @ dequantize(packed, grad.dtype)


@nf4_linear.register_fake
def _(x: Tensor, packed: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@nf4_linear_backward.register_fake
def _(grad: Tensor, packed: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], packed.shape[1] // BLOCK_BYTES * BLOCK)


def _keep_bytes(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return nf4_linear_backward(grad, *ctx.saved_tensors), None


nf4_linear.register_autograd(_backward, setup_context=_keep_bytes)


class NF4Linear(nn.Linear):
    """Takes the place of ``linear``, whose weight is one of bytes."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def apply_nf4(model: nn.Module, names: Iterable[str]) -> None:
    """Give the linear layers called ``names``, on the meta device, weights of bytes, in place; other stages'
    are passed over.

    Raises:
        ConfigError: one of them is neither a plain linear layer nor one that LoRA updates.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            continue
        layer: Any = modules[name]
        updated = hasattr(layer, "lora_a")
        if not updated:
            key = "finetune.lora.quantize_base"
            check_plain(name, layer, key=key, value="nf4", without="remove it")
        rows, columns = layer.weight.shape
        packed = layer.weight.new_empty(rows, columns // BLOCK * BLOCK_BYTES, dtype=torch.uint8)
        layer.weight = nn.Parameter(packed, requires_grad=False)
        if not updated:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, NF4Linear(layer))


# Filling


class Packed:
    """A weight of bytes, DTensor or plain, of the shape of its numbers, whose rows are quantised as they are
    filled: never more of them than a block of rows is there as numbers."""

    def __init__(self, packed: Tensor):
        self.packed = packed

    @property
    def shape(self) -> torch.Size:
        rows, width = self.packed.shape
        return torch.Size([rows, width // BLOCK_BYTES * BLOCK])

    @property
    def is_meta(self) -> bool:
        return self.packed.is_meta

    def local_part(self) -> tuple[Packed, tuple[int, ...]]:
        """See :func:`toolkit.distributed.dtensor.local_part`."""
        local, (row, byte) = local_part(self.packed)
        return Packed(local), (row, byte // BLOCK_BYTES * BLOCK)

    def __getitem__(self, rows: slice) -> Packed:
        return Packed(self.packed[rows])

    def copy_(self, numbers: Tensor) -> None:
        self.packed.copy_(quantize(numbers.to(self.packed.device)))

    def fill_(self, value: float) -> None:
        self.copy_(torch.full(self.shape, value))
