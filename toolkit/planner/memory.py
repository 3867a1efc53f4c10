"""Compute what single ranks of a run store, by building their part of the model without its numbers.

A process group that sends nothing stands in for the world, so that one process takes the place of any rank
of any number. The model is built as for training, on the meta device, where a tensor has a shape and no
storage.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from toolkit import compat
from toolkit.build import build_model
from toolkit.compat import fsdp_state
from toolkit.config import Config
from toolkit.distributed.dtensor import clean_name, local
from toolkit.models.common.args import ModelArgs
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.dims import ParallelDims
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.model_parts import ModelParts


@dataclass(frozen=True)
class Part:
    """A rank's part ``local`` of the parameter ``name``, which is of shape ``whole`` and may be frozen."""

    name: str
    whole: tuple[int, ...]
    local: tuple[int, ...]
    bytes: int
    trained: bool


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together: the ``bytes`` that the rank then has, which tensor parallelism
    has cut, and numbers of gradients, whole and as the rank stores them."""

    name: str
    bytes: int
    gradients: int
    stored_gradients: int


@dataclass(frozen=True)
class Holding:
    """Shards of model and optimizer that ``rank`` stores."""

    rank: int
    parts: list[Part]
    units: list[Unit]
    optimizer_bytes: int

    @property
    def parameter_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def gradient_bytes(self) -> int:
        return sum(part.bytes for part in self.parts if part.trained)


def holding(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    rank: int,
    *,
    param_dtype: torch.dtype,
) -> Holding:
    """Count what ``rank`` of a run that passed the preflight stores after its first step.

    It computes in ``param_dtype``. Needs no process group, and must not be called where there is one.
    """
    with pretended(rank, layout.world_size):
        device = torch.device("cpu")
        mesh = build_mesh(device, **asdict(layout))
        model_parts = build_model(config, args, mesh, device, param_dtype=param_dtype, seed=0, storage=False)
        named = [*model_parts.named_parameters(), *model_parts.tied_copies()]
        optimizer = _optimizer(config, named)
        return Holding(
            rank=rank,
            parts=[_part(name, parameter) for name, parameter in named],
            units=list(_units(model_parts, param_dtype)),
            optimizer_bytes=sum(local(it).nbytes for it in optimizer_tensors(named, optimizer).values()),
        )


@contextmanager
def pretended(rank: int, world_size: int) -> Iterator[None]:
    """This process as ``rank`` of a world whose other ranks do not exist: collectives return at once."""
    hook = sys.excepthook  # around which torch puts one that names the rank
    dist.init_process_group("fake", store=compat.FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _part(name: str, parameter: nn.Parameter) -> Part:
    here = local(parameter)
    return Part(name, tuple(parameter.shape), tuple(here.shape), here.nbytes, parameter.requires_grad)


def _optimizer(config: Config, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    # The kernels differ in speed alone, and the fused ones are for devices that compute.
    changes = {"implementation": "for-loop", "early_step_in_backward": False}  # which change no state
    options = config.optimizer.model_copy(update=changes)
    return build_optimizer(named, config.model_copy(update={"optimizer": options}))


def _units(model_parts: ModelParts, dtype: torch.dtype) -> Iterator[Unit]:
    """The FSDP units of the stages here, in order. Modules that are gathered together share a state."""
    for model in model_parts.models:
        modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        states = {name: fsdp_state(module) for name, module in modules.items()}
        held: dict[object, list[nn.Parameter]] = {state: [] for state in states.values()}
        for name, parameter in model.named_parameters():
            holder = name.rpartition(".")[0]
            while holder not in states:
                holder = holder.rpartition(".")[0]
            held[states[holder]].append(parameter)
        for state, parameters in held.items():
            if not parameters:  # a root whose units have all
                continue
            names = [clean_name(name) or "the rest" for name in states if states[name] is state]
            yield Unit(
                ", ".join(names),
                bytes=sum(gathered_numbers(it) * gathered_dtype(it, dtype).itemsize for it in parameters),
                gradients=sum(gathered_numbers(it) for it in parameters if it.requires_grad),
                stored_gradients=sum(local(it).numel() for it in parameters if it.requires_grad),
            )


def gathered_dtype(parameter: Tensor, param_dtype: torch.dtype) -> torch.dtype:
    """The dtype that a parameter is gathered in: bytes where they stand for other numbers."""
    if hasattr(local(parameter), "fsdp_pre_all_gather"):  # makes float8 of it
        return torch.uint8
    return param_dtype if parameter.is_floating_point() else parameter.dtype


def gathered_numbers(parameter: nn.Parameter) -> int:
    """Numbers of a parameter once FSDP has gathered it: all but what tensor parallelism has cut off."""
    numbers = parameter.numel()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for name, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=False):
            if name == "tp" and placement.is_shard():
                numbers //= mesh[name].size()
    return numbers
