"""AdamW with 8-bit moments: "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.

Each block of 256 elements of a row stores its largest magnitude in fp32. Each element is stored as the
nearest of 256 fractions of that, which are denser near 0: 2.03 bytes per parameter instead of 8. Updates are
computed in at least fp32, then the moments are quantized.

Blocks are aligned to the rows of the full matrix. Shards contain whole blocks, and codes and scales are
sharded like the parameter. Results are therefore the same on any mesh, and a checkpoint can be resumed on any
other. (torchao chooses the moments with 8 bits by the size of a shard, so its checkpoints are tied to one
mesh; bitsandbytes does not support DTensor.) Moments of vectors, of small matrices, and of rows that are not
multiples of 256 have the parameter's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from toolkit.compat import DTensorSpec, TensorMeta
from toolkit.config import Config
from toolkit.distributed.dtensor import local
from toolkit.fused import Fused
from toolkit.hardware import cached_tensors, device_type
from toolkit.optim.optimizer import NamedParameters, parameter_groups
from toolkit.optim.selection import BLOCK, in_8bit

_CHUNK = {"cuda": 1 << 24}
"""Number of elements in fp32 at a time; the default 1 << 16 fits in a CPU's caches."""


class AdamW8bit(Optimizer):
    """torch's AdamW with 8-bit state, for plain parameters and DTensors.

    Raises:
        ValueError: sharding splits a block of a parameter.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.01
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update parameters that have gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.fresh_state(parameter, group))
                state["step"] += 1
                shards = {name: local(tensor) for name, tensor in state.items()}
                _update(local(parameter), local(parameter.grad), shards, group)

    def fresh_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state before the first step: codes of the parameter's shape, and one scale per block."""
        state = {"step": torch.zeros(())}
        for moment in ("exp_avg", "exp_avg_sq"):
            if in_8bit(parameter.shape) and "adamw" not in group:
                state[f"{moment}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{moment}_scales"] = _scales(parameter)
            else:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def build(parameters: NamedParameters, config: Config) -> AdamW8bit:
    """Build the optimizer of a run."""
    options = config.optimizer
    return AdamW8bit(
        parameter_groups(parameters, config),
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )


def _scales(parameter: nn.Parameter) -> Tensor:
    shard = local(parameter)
    if shard.shape[1] % BLOCK:
        raise ValueError(f"rows of {shard.shape[1]} elements are not divisible into blocks of {BLOCK}")
    dtype = torch.promote_types(shard.dtype, torch.float32)
    scales = torch.zeros(len(shard), shard.shape[1] // BLOCK, dtype=dtype, device=shard.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((parameter.shape[0], parameter.shape[1] // BLOCK))
    meta = TensorMeta(shape, (shape[1], 1), dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    # from_local() would move offloaded and meta tensors to the mesh's device.
    return DTensor(scales, spec, requires_grad=False)


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    steps = state.pop("step").item()
    if not parameter.numel():  # some ranks have no rows of a small parameter
        return
    state |= {"parameter": parameter, "gradient": gradient.contiguous()}
    width = 1 if "exp_avg" in state else BLOCK
    rows = {
        name: tensor.view(-1) if name.endswith("_scales") else tensor.view(-1, width)
        for name, tensor in state.items()
    }
    (beta1, beta2), rate = group["betas"], group["lr"]
    precise = torch.promote_types(parameter.dtype, torch.float32)
    maps = {} if width == 1 else {it: _map(it, precise, parameter.device) for it in ("exp_avg", "exp_avg_sq")}
    values = 1 - rate * group["weight_decay"], math.sqrt(1 - beta2**steps), rate / (1 - beta1**steps)
    decay, root, step = (_scalar(value, precise, parameter.device) for value in values)
    for chunk in _chunks(rows["parameter"]):
        tensors = {name: tensor[chunk] for name, tensor in rows.items()}
        _step(tensors["parameter"], tensors, maps, (beta1, beta2, group["eps"], decay, root, step))


def _step_rows(parameter: Tensor, tensors: dict[str, Tensor], maps: dict[str, Map], options: Any) -> None:
    beta1, beta2, eps, decay, root, step = options
    x, grad = _precise(parameter), _precise(tensors["gradient"])
    mean = _dequantize(tensors, "exp_avg", maps).lerp_(grad, 1 - beta1)
    square = _dequantize(tensors, "exp_avg_sq", maps).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    _quantize(tensors, "exp_avg", mean, maps)
    _quantize(tensors, "exp_avg_sq", square, maps)
    denominator = square.sqrt_().div_(root).add_(eps)
    parameter.copy_((x * decay).addcdiv_(mean.mul_(step), denominator, value=-1))


_step = Fused("adamw_8bit", _step_rows, dynamic=True)


@cached_tensors
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scalar tensor, because a compiled function would be recompiled for each Python number. The
    tensor is filled on the device, because a copy from the host would synchronize."""
    return torch.full((), value, dtype=dtype, device=device)


def _chunks(x: Tensor) -> Iterator[slice]:
    rows = max(1, _CHUNK.get(device_type(x.device.type), 1 << 16) // x.shape[1])
    return (slice(first, first + rows) for first in range(0, len(x), rows))


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dequantize(tensors: dict[str, Tensor], moment: str, maps: dict[str, Map]) -> Tensor:
    """Return a moment in at least fp32, in newly allocated memory."""
    if moment in tensors:
        return _precise(tensors[moment]).clone()
    codes, scales = tensors[f"{moment}_codes"], tensors[f"{moment}_scales"]
    values, _, _ = maps[moment]
    return values.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(scales[:, None])


def _quantize(tensors: dict[str, Tensor], moment: str, x: Tensor, maps: dict[str, Map]) -> None:
    """Store a moment, either in its dtype or as the nearest fractions of each block's largest magnitude."""
    if moment in tensors:
        tensors[moment].copy_(x)
        return
    scales = tensors[f"{moment}_scales"]
    scales.copy_(x.abs().amax(1))
    fractions = (x / scales.clamp(min=torch.finfo(scales.dtype).tiny)[:, None]).view(-1)
    _, bounds, least = maps[moment]
    # torch.bucketize would take twenty times as long on a CPU.
    codes = least.index_select(0, (fractions.float().view(torch.int32) >> 16) & 0xFFFF)
    codes = codes + (fractions >= bounds.index_select(0, codes.int()))
    tensors[f"{moment}_codes"].copy_(codes.view(x.shape))


Map = tuple[Tensor, Tensor, Tensor]


@cached_tensors
def _map(moment: str, dtype: torch.dtype, device: torch.device) -> Map:
    """Return three tensors: the sorted fractions of the 256 codes; the bounds above which the next code is
    nearer; and a table from the upper 16 bits of an fp32 value to the code of the smallest value with these
    bits. That code is the value's own or the one before it.

    Each of seven powers of ten has evenly spaced fractions, twice as many as the next lower power, and half
    as many if signed; 0 and 1 complete the 256.
    """
    signed = moment == "exp_avg"
    fractions = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (power - 6)
        fractions += [*middles.tolist(), *(-middles).tolist()] if signed else middles.tolist()
    values = torch.tensor(sorted(fractions), dtype=torch.float32).to(dtype)
    bounds = (values[1:] + values[:-1]) / 2
    upper_bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).roll(1 << 15) << 16
    least_values = torch.where(upper_bits < 0, upper_bits | 0xFFFF, upper_bits).view(torch.float32)
    least = torch.bucketize(least_values.nan_to_num(nan=1).to(dtype), bounds, right=True).to(torch.uint8)
    bounds = torch.cat([bounds, bounds.new_tensor([math.inf])])
    return values.to(device), bounds.to(device), least.to(device)
