"""NF4: frozen weights of linear layers in 4 bits. Each is one of 16 levels times the scale of its block
(QLoRA, Dettmers et al. 2023, arXiv:2305.14314).

A block is 64 elements of a row; its scale is their largest magnitude, in fp32. Levels, codes and scales are
bit-identical to those of bitsandbytes. Each block is stored as 32 bytes of codes, two per byte, followed by
the four bytes of the scale, 4.5 bits per element, in one uint8 tensor (out, in / 64 · 36) with the weight's
name. The tensor is sharded by rows, or by columns at block boundaries, like any other parameter, and no
precision policy casts it. Stacked experts (E, out, in) are stored as (E, out, in / 64 · 36).

A layer dequantizes its weight for each matmul, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.distributed.dtensor import shard_and_offset
from toolkit.finetune.parameters import NF4_BLOCK as BLOCK
from toolkit.fused import Fused
from toolkit.hardware import cached_tensors
from toolkit.models.common.grouped_linear import grouped_linear as plain_grouped_linear
from toolkit.models.common.plain_linear import check_plain

BLOCK_BYTES = BLOCK // 2 + 4
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, including zero: appendix E of the paper."""
_CHUNK = 1 << 23
"""Number of elements to dequantize in fp32 at a time."""


def quantize(weight: Tensor) -> Tensor:
    """Quantize rows (…, C) to bytes (…, C / 64 · 36)."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(dim=-1, keepdim=True)
    units = blocks * (1 / scales.clamp(min=1e-38))  # rounds like bitsandbytes, unlike a division
    levels = torch.tensor(LEVELS, device=weight.device)
    codes = torch.bucketize(units, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    pairs = codes[..., ::2] << 4 | codes[..., 1::2]
    return torch.cat([pairs, scales.view(torch.uint8)], dim=-1).flatten(-2)


# This and the matmuls below are custom operators; otherwise torch.compile would save the dequantized weights
# of all layers for backward.
@torch.library.custom_op("toolkit::nf4_dequantize", mutates_args=())
def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize bytes (R, C / 64 · 36) to (R, C) in ``dtype``, multiplying in fp32."""
    levels = _pairs_of_levels(packed.device)
    if _elements.applies_to(packed):
        return _elements(packed, levels, dtype)
    rows, width = packed.shape
    columns = width // BLOCK_BYTES * BLOCK
    elements = packed.new_empty(rows, columns, dtype=dtype)
    step = max(1, _CHUNK // columns)
    for target, rows_of_bytes in zip(elements.split(step), packed.split(step), strict=True):
        target.copy_(_elements(rows_of_bytes, levels, torch.float32))
    return elements


def _dequantize_rows(packed: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = packed.unflatten(-1, (-1, BLOCK_BYTES))[..., : BLOCK // 2]
    scales = packed.view(torch.float32).unflatten(-1, (-1, BLOCK_BYTES // 4))[..., BLOCK // 8 :]
    return levels[pairs.int()].flatten(-2).mul_(scales).flatten(-2).to(dtype)


_elements = Fused("nf4", _dequantize_rows)


@dequantize.register_fake
def _(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(packed.shape[0], packed.shape[1] // BLOCK_BYTES * BLOCK, dtype=dtype)


@cached_tensors
def _pairs_of_levels(device: torch.device) -> Tensor:
    """Return the two levels of each byte, (256, 2)."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)


# Matmuls


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear with a weight that may be in NF4."""
    if weight.dtype != torch.uint8:
        return F.linear(x, weight, bias)
    output = nf4_linear(x, weight)
    return output if bias is None else output + bias


@torch.library.custom_op("toolkit::nf4_linear", mutates_args=())
def nf4_linear(x: Tensor, packed: Tensor) -> Tensor:
    """Compute x Wᵀ with the NF4 weight W; only its bytes are saved for backward."""
    return F.linear(x, dequantize(packed, x.dtype))


@torch.library.custom_op("toolkit::nf4_linear_backward", mutates_args=())
def nf4_linear_backward(grad: Tensor, packed: Tensor) -> Tensor:
    """Compute the gradient of x."""
    return grad @ dequantize(packed, grad.dtype)


@nf4_linear.register_fake
def _(x: Tensor, packed: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@nf4_linear_backward.register_fake
def _(grad: Tensor, packed: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], packed.shape[1] // BLOCK_BYTES * BLOCK)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return nf4_linear_backward(grad, *ctx.saved_tensors), None


nf4_linear.register_autograd(_backward, setup_context=_setup_context)


def grouped_linear(x_MK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Compute :func:`toolkit.models.common.grouped_linear.grouped_linear` with weights that may be in NF4,
    (E, N, K / 64 · 36): all experts of a rank are dequantized at once."""
    if weight_ENK.dtype != torch.uint8:
        return plain_grouped_linear(x_MK, weight_ENK, ends_E)
    if torch.compiler.is_compiling():
        return nf4_grouped_linear(x_MK, weight_ENK, ends_E, False)
    return _GroupedLinear.apply(x_MK, weight_ENK, ends_E)  # of which a dry run sees the dequantized weights


def _multiply_experts(x_MK: Tensor, packed: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    weight_ENK = dequantize(packed.flatten(0, 1), x_MK.dtype).unflatten(0, packed.shape[:2])
    return plain_grouped_linear(x_MK, weight_ENK.mT if transposed else weight_ENK, ends_E)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, packed: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(packed, ends_E)
        return _multiply_experts(x_MK, packed, ends_E, False)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, None, None]:
        packed, ends_E = ctx.saved_tensors
        return _multiply_experts(grad_MN.contiguous(), packed, ends_E, True), None, None


nf4_grouped_linear = torch.library.custom_op(
    "toolkit::nf4_grouped_linear", _multiply_experts, mutates_args=()
)  # fmt: skip


@nf4_grouped_linear.register_fake
def _(x_MK: Tensor, packed: Tensor, ends_E: Tensor, transposed: bool) -> Tensor:
    return x_MK.new_empty(
        x_MK.shape[0], packed.shape[2] // BLOCK_BYTES * BLOCK if transposed else packed.shape[1]
    )


def _setup_grouped(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _grouped_backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, None, None, None]:
    return nf4_grouped_linear(grad_MN.contiguous(), *ctx.saved_tensors, True), None, None, None


nf4_grouped_linear.register_autograd(_grouped_backward, setup_context=_setup_grouped)


class NF4Linear(nn.Linear):
    """Replacement of ``linear`` with an NF4 weight."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def apply_nf4(model: nn.Module, names: Iterable[str]) -> None:
    """Convert the linear layers named ``names`` to NF4, on the meta device, in place; layers of other stages
    are skipped.

    Raises:
        ConfigError: a layer is neither a plain torch.nn.Linear nor a LoRA layer.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            continue
        layer: Any = modules[name]
        has_lora = hasattr(layer, "lora_a")
        if not has_lora:
            key = "finetune.lora.quantize_base"
            check_plain(name, layer, key=key, value="nf4", without='set it to "none"')
        layer.weight = new_packed(layer.weight)
        if not has_lora:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, NF4Linear(layer))


def new_packed(weight: Tensor) -> nn.Parameter:
    """Return an uninitialized NF4 parameter for ``weight`` (…, K)."""
    *outer, columns = weight.shape
    packed = weight.new_empty(*outer, columns // BLOCK * BLOCK_BYTES, dtype=torch.uint8)
    return nn.Parameter(packed, requires_grad=False)


# Initialization and loading


class PackedWeight:
    """An NF4 weight, DTensor or plain, with the shape of the original. The weight quantizes rows while being
    filled, so that at most one block of rows exists in full precision."""

    def __init__(self, packed: Tensor):
        self.packed = packed

    @property
    def shape(self) -> torch.Size:
        *outer, width = self.packed.shape
        return torch.Size([*outer, width // BLOCK_BYTES * BLOCK])

    @property
    def is_meta(self) -> bool:
        return self.packed.is_meta

    def shard_and_offset(self) -> tuple[PackedWeight, tuple[int, ...]]:
        """See :func:`toolkit.distributed.dtensor.shard_and_offset`."""
        local, (*outer, byte) = shard_and_offset(self.packed)
        return PackedWeight(local), (*outer, byte // BLOCK_BYTES * BLOCK)

    def __getitem__(self, rows: slice) -> PackedWeight:
        return PackedWeight(self.packed[rows])

    def copy_(self, values: Tensor) -> None:
        self.packed.copy_(quantize(values.to(self.packed.device)))

    def fill_(self, value: float) -> None:
        self.copy_(torch.full(self.shape, value))
