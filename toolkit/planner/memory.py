"""Compute the sharded state of single ranks by building their model on the meta device.

With a fake process group, one process can act as any rank of any world. The model is built as for training,
but its tensors have no storage.
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
from toolkit.hardware import simulate
from toolkit.models.common.args import ModelArgs
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.dims import ParallelDims
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.model_parts import ModelParts


@dataclass(frozen=True)
class ParameterShard:
    """A rank's shard, of shape ``local``, of the parameter ``name`` of shape ``whole``, which may be
    frozen."""

    name: str
    whole: tuple[int, ...]
    local: tuple[int, ...]
    bytes: int
    trained: bool


@dataclass(frozen=True)
class UnitMemory:
    """An FSDP unit: gathered ``bytes`` (sharded only by tensor parallelism), and the number of elements of
    its unsharded and of its stored gradients."""

    name: str
    bytes: int
    gradients: int
    stored_gradients: int


@dataclass(frozen=True)
class RankState:
    """Sharded model and optimizer state of ``rank``."""

    rank: int
    parts: list[ParameterShard]
    units: list[UnitMemory]
    optimizer_bytes: int

    @property
    def parameter_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def gradient_bytes(self) -> int:
        return sum(part.bytes for part in self.parts if part.trained)


def rank_state(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    rank: int,
    *,
    param_dtype: torch.dtype,
    target: str = "cpu",
) -> RankState:
    """Compute the state of ``rank`` after its first step, in a run that passed the preflight.

    The run computes in ``param_dtype`` on the device type ``target``. Call this without a process group.
    """
    with fake_world(rank, layout.world_size), simulate(target):
        device = torch.device("cpu")
        mesh = build_mesh(device, **asdict(layout))
        model_parts = build_model(config, args, mesh, device, param_dtype=param_dtype, seed=0, storage=False)
        parameters = [*model_parts.named_parameters(), *model_parts.tied_copies()]
        optimizer = _optimizer(config, parameters, args.n_layers)
        of_teacher = [it for model in model_parts.objective.models for it in model.named_parameters()]
        frozen = [(f"teacher.{clean_name(name)}", it) for name, it in of_teacher]
        return RankState(
            rank=rank,
            parts=[_shard(name, parameter) for name, parameter in (*parameters, *frozen)],
            units=list(_units(model_parts, param_dtype)),
            optimizer_bytes=sum(local(it).nbytes for it in optimizer_tensors(parameters, optimizer).values()),
        )


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Make this process act as ``rank`` of a fake world, in which collectives return immediately."""
    hook = sys.excepthook  # torch wraps it to add the rank
    dist.init_process_group("fake", store=compat.FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _shard(name: str, parameter: nn.Parameter) -> ParameterShard:
    shard = local(parameter)
    return ParameterShard(
        name, tuple(parameter.shape), tuple(shard.shape), shard.nbytes, parameter.requires_grad
    )


def _optimizer(config: Config, parameters: Sequence[tuple[str, nn.Parameter]], n_layers: int) -> Optimizer:
    # Implementations differ only in speed, and the fused kernels need a real device.
    changes = {"implementation": "for-loop", "early_step_in_backward": False}  # neither changes the state
    options = config.optimizer.model_copy(update=changes)
    return build_optimizer(parameters, config.model_copy(update={"optimizer": options}), n_layers=n_layers)


def _units(model_parts: ModelParts, dtype: torch.dtype) -> Iterator[UnitMemory]:
    """Yield the FSDP units of this rank's stages, in order. Modules of one unit share an FSDP state."""
    for model in model_parts.models:
        modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        states = {name: fsdp_state(module) for name, module in modules.items()}
        unit_parameters: dict[object, list[nn.Parameter]] = {state: [] for state in states.values()}
        for name, parameter in model.named_parameters():
            owner = name.rpartition(".")[0]
            while owner not in states:
                owner = owner.rpartition(".")[0]
            unit_parameters[states[owner]].append(parameter)
        for state, parameters in unit_parameters.items():
            if not parameters:  # a root without its own parameters
                continue
            names = [clean_name(name) or "the rest" for name in states if states[name] is state]
            sharded = [it for it in parameters if isinstance(it, DTensor)]  # FSDP ignores the others
            yield UnitMemory(
                ", ".join(names),
                bytes=sum(gathered_elements(it) * gathered_dtype(it, dtype).itemsize for it in sharded),
                gradients=sum(gathered_elements(it) for it in sharded if it.requires_grad),
                stored_gradients=sum(local(it).numel() for it in parameters if it.requires_grad),
            )


def gathered_dtype(parameter: Tensor, param_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter is gathered; uint8 represents packed formats."""
    if hasattr(local(parameter), "fsdp_pre_all_gather"):  # casts to float8
        return torch.uint8
    return param_dtype if parameter.is_floating_point() else parameter.dtype


def gathered_elements(parameter: nn.Parameter) -> int:
    """Return the number of elements of a parameter that FSDP gathers: all that a rank has after sharding by
    tensor and expert parallelism."""
    elements = parameter.numel()
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for name, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=False):
            if name in ("tp", "ep", "etp") and placement.is_shard():
                elements //= mesh[name].size()
    return elements
