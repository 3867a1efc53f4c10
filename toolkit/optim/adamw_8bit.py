"""AdamW with both moments in 8 bits: "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861.

Of each 256 numbers of a row the largest magnitude is kept in fp32, and of each number the nearest of 256
parts of that magnitude, which lie closer together near 0: 2.03 bytes a parameter in place of 8. An update is
computed in at least fp32, and its moments are rounded after it.

Blocks lie in the rows of the whole matrix. A shard of whole rows, or of parts of them by whole blocks, has
the blocks that one process has, and codes and magnitudes are cut over the mesh as the parameter is: any mesh
computes the same, and goes on from a checkpoint of any other. (torchao chooses by the size of a shard which
moments have 8 bits, so that its checkpoints are of one mesh. bitsandbytes knows no DTensor.) Vectors, small
matrices and rows that are no multiple of 256 have moments of the parameter's precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from toolkit.compat import DTensorSpec, TensorMeta
from toolkit.config import Config
from toolkit.distributed.dtensor import local
from toolkit.fused import Fused
from toolkit.optim.in_8bit import BLOCK, in_8bit
from toolkit.optim.optimizer import NamedParameters, parameter_groups

_PIECE = {"cuda": 1 << 24}
"""Numbers that are in fp32 at once; elsewhere 1 << 16, which fit into the caches of a CPU."""


class AdamW8bit(Optimizer):
    """torch's AdamW but for its state, of plain parameters and DTensors.

    Raises:
        ValueError: a parameter has parts of rows that are not whole blocks.
    """

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.01
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.fresh_state(parameter, group))
                state["step"] += 1
                parts = {name: local(tensor) for name, tensor in state.items()}
                _update(local(parameter), local(parameter.grad), parts, group)

    def fresh_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step. Codes have its shape, magnitudes one number a block."""
        state = {"step": torch.zeros(())}
        for moment in ("exp_avg", "exp_avg_sq"):
            if in_8bit(parameter.shape):
                state[f"{moment}_codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"{moment}_scales"] = _scales(parameter)
            else:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def build(parameters: NamedParameters, config: Config) -> AdamW8bit:
    """Build the optimizer of a run."""
    options = config.optimizer
    return AdamW8bit(
        parameter_groups(parameters, weight_decay=options.weight_decay, no_decay=options.no_decay),
        lr=options.lr,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )


def _scales(parameter: nn.Parameter) -> Tensor:
    part = local(parameter)
    if part.shape[1] % BLOCK:
        raise ValueError(f"rows of {part.shape[1]} are not whole blocks of {BLOCK}")
    dtype = torch.promote_types(part.dtype, torch.float32)
    scales = torch.zeros(len(part), part.shape[1] // BLOCK, dtype=dtype, device=part.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((parameter.shape[0], parameter.shape[1] // BLOCK))
    meta = TensorMeta(shape, (shape[1], 1), dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    # Not by from_local(), which would move what is offloaded or without storage to the device of the mesh.
    return DTensor(scales, spec, requires_grad=False)


def _update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    steps = state.pop("step").item()
    if not parameter.numel():  # of few rows some ranks have none
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
    for piece in _pieces(rows["parameter"]):
        here = {name: tensor[piece] for name, tensor in rows.items()}
        _step(here["parameter"], here, maps, (beta1, beta2, group["eps"], decay, root, step))


def _step_of_rows(parameter: Tensor, here: dict[str, Tensor], maps: dict[str, Map], options: Any) -> None:
    beta1, beta2, eps, decay, root, step = options
    x, grad = _precise(parameter), _precise(here["gradient"])
    mean = _read(here, "exp_avg", maps).lerp_(grad, 1 - beta1)
    square = _read(here, "exp_avg_sq", maps).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    _write(here, "exp_avg", mean, maps)
    _write(here, "exp_avg_sq", square, maps)
    denominator = square.sqrt_().div_(root).add_(eps)
    parameter.copy_((x * decay).addcdiv_(mean.mul_(step), denominator, value=-1))


_step = Fused("adamw_8bit", _step_of_rows, dynamic=True)


@lru_cache(maxsize=16)
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor, since a compiled function would be compiled again for each other number. It is filled on the
    device, for which a copy from the host would wait."""
    return torch.full((), value, dtype=dtype, device=device)


def _pieces(x: Tensor) -> Iterator[slice]:
    rows = max(1, _PIECE.get(x.device.type, 1 << 16) // x.shape[1])
    return (slice(first, first + rows) for first in range(0, len(x), rows))


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _read(here: dict[str, Tensor], moment: str, maps: dict[str, Map]) -> Tensor:
    """A moment in at least fp32, in memory of its own."""
    if moment in here:
        return _precise(here[moment]).clone()
    codes, scales = here[f"{moment}_codes"], here[f"{moment}_scales"]
    values, _, _ = maps[moment]
    return values.index_select(0, codes.view(-1).int()).view(codes.shape).mul_(scales[:, None])


def _write(here: dict[str, Tensor], moment: str, x: Tensor, maps: dict[str, Map]) -> None:
    """Keep a moment, in its precision or as the nearest parts of the largest magnitude of each block."""
    if moment in here:
        here[moment].copy_(x)
        return
    scales = here[f"{moment}_scales"]
    scales.copy_(x.abs().amax(1))
    parts = (x / scales.clamp(min=torch.finfo(scales.dtype).tiny)[:, None]).view(-1)
    _, bounds, least = maps[moment]
    # torch.bucketize would take twenty times as long on a CPU.
    codes = least.index_select(0, (parts.float().view(torch.int32) >> 16) & 0xFFFF)
    codes = codes + (parts >= bounds.index_select(0, codes.int()))
    here[f"{moment}_codes"].copy_(codes.view(x.shape))


Map = tuple[Tensor, Tensor, Tensor]


@cache
def _map(moment: str, dtype: torch.dtype, device: torch.device) -> Map:
    """The parts of a magnitude that codes stand for, in order; from where on the next code is nearer; and, by
    the first 16 bits of a number in fp32, the code of the least such number, which is the number's or the
    one before it.

    In each of seven powers of ten are evenly spaced parts, twice as many in each as in the one below; half as
    many with a sign. 0 and 1 make them 256.
    """
    signed = moment == "exp_avg"
    parts = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (power + (not signed)) + 1)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (power - 6)
        parts += [*middles.tolist(), *(-middles).tolist()] if signed else middles.tolist()
    values = torch.tensor(sorted(parts), dtype=torch.float32).to(dtype)
    bounds = (values[1:] + values[:-1]) / 2
    first_bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).roll(1 << 15) << 16
    numbers = torch.where(first_bits < 0, first_bits | 0xFFFF, first_bits).view(torch.float32)
    least = torch.bucketize(numbers.nan_to_num(nan=1).to(dtype), bounds, right=True).to(torch.uint8)
    bounds = torch.cat([bounds, bounds.new_tensor([math.inf])])
    return values.to(device), bounds.to(device), least.to(device)
