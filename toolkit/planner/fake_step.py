"""One step of one rank that computes nothing: the model, the schedule and the optimizer of the run itself, on
tensors that have shapes and no storage, in a world whose other ranks do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.build import build_model
from toolkit.config import Config
from toolkit.data.batch_size import BatchShape, batch_shape
from toolkit.models.common.args import ModelArgs
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.dims import ParallelDims
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch
from toolkit.planner.memory import pretended
from toolkit.train_step import TrainStep


@dataclass(frozen=True)
class FakeRun:
    """A rank before a step; ``state`` has the optimizer's tensors. ``passes`` are the step's forwards and
    backwards alone."""

    model_parts: ModelParts
    optimizer: Optimizer
    state: list[Tensor]
    step: Callable[[], Any]
    passes: Callable[[], Any]


class _Numbers(TorchDispatchMode):
    """Reads 1 wherever a number of a tensor is asked for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return function(*args, **(kwargs or {}))


@contextmanager
def fake_run(
    config: Config, args: ModelArgs, layout: ParallelDims, rank: int, *, param_dtype: torch.dtype
) -> Iterator[FakeRun]:
    """Build ``rank`` of a run that passed the preflight. Nothing is compiled, FSDP's collectives have buffers
    of their own, and attention is SDPA where it would be FlexAttention. Needs no process group, and must not
    be called where there is one.
    """
    config = _simplified(config)
    device = torch.device("cpu")
    batch = batch_shape(
        global_batch_size=config.training.global_batch_size,
        local_batch_size=config.training.local_batch_size,
        dp=layout.dp,
    )
    assert batch, "the preflight found that the batch divides"
    with pretended(rank, layout.world_size), ExitStack() as stack:
        mesh = build_mesh(device, **asdict(layout))
        model_parts = build_model(config, args, mesh, device, param_dtype=param_dtype, seed=0, storage=False)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Numbers())
        for model in model_parts.models:
            model.to_empty(device=device)
        named = [*model_parts.named_parameters(), *model_parts.tied_copies()]
        optimizer = build_optimizer(named, config)
        step = TrainStep(
            model_parts,
            optimizer,
            max_norm=config.training.max_norm,
            device=device,
            in_backward=config.optimizer.early_step_in_backward,
        )
        yield FakeRun(
            model_parts,
            optimizer,
            list(optimizer_tensors(named, optimizer).values()),
            lambda: step(_batches(config, batch), learning_rate=1e-3),
            lambda: model_parts.backward(
                [model_parts.prepare(each, device) for each in _batches(config, batch)],
                torch.ones((), dtype=torch.float64),
            ),
        )


def _simplified(config: Config) -> Config:
    attention = "sdpa" if config.model.attention in ("auto", "flex", "varlen") else config.model.attention
    return config.model_copy(
        update={
            "compile": config.compile.model_copy(update={"enable": False}),
            "model": config.model.model_copy(update={"attention": attention}),
            "parallelism": config.parallelism.model_copy(update={"fsdp_shared_memory": False}),
        }
    )


def _batches(config: Config, batch: BatchShape) -> list[MicroBatch]:
    """The micro-batches of a step, of documents where pairs are compared."""
    shape = (batch.local, config.training.seq_len)
    pairs = config.finetune.objective == "dpo"
    return [
        {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "positions": None,
            "documents": torch.zeros(shape, dtype=torch.int32) if pairs else None,
        }
        for _ in range(batch.accumulation)
    ]
