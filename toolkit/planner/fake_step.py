"""One step of one rank that computes nothing: the model, the schedule and the optimizer of the run itself, on
tensors that have shapes and no storage, in a world whose other ranks do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit import fused, loss
from toolkit.build import build_model
from toolkit.compat import (
    FakeTensor,
    FakeTensorMode,
    local_scalar,
    tree_iter,
    unset_fake_temporarily,
)
from toolkit.config import Config
from toolkit.data.batch_size import BatchShape, batch_shape
from toolkit.models.common.args import ModelArgs
from toolkit.optim import grad_clip
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel import activation_offload, fsdp
from toolkit.parallel.dims import ParallelDims, uses_ring
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch
from toolkit.parallel.pipeline_parallel import Pipeline
from toolkit.planner.allocations import StepMemory, watched
from toolkit.planner.memory import pretended
from toolkit.train_step import TrainStep

_PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_KEEP_ALL = ("GPipe", "LoopedBFS")
"""Schedules whose backwards begin when all forwards have ended."""
_ON_THE_HOST = ("parameters", "gradients", "optimizer state", "work of the update")
"""Parts that ``training.enable_cpu_offload`` keeps in CPU memory."""


@dataclass(frozen=True)
class FakeRun:
    """A rank before a step; ``state`` has the optimizer's tensors. ``passes`` are the step's forwards and
    backwards alone."""

    model_parts: ModelParts
    optimizer: Optimizer
    state: list[Tensor]
    step: Callable[[], Any]
    passes: Callable[[], Any]


class _OnTheHost(activation_offload.HostCopy):
    """Takes none of the device's memory, and so none here."""

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.device_copy = None

    def fetch(self) -> None:
        if self.device_copy is None:
            self.device_copy = torch.empty(self.shape, dtype=self.dtype)


class _Shapes(FakeTensorMode):
    """Tensors without storage, whose operations are remembered by the shapes that they are given.

    Torch's own memory of them takes three times as long, which is most of a fake step's time.
    """

    _known: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is local_scalar.default and type(args[0]) is FakeTensor:
            return 1.0 if args[0].is_floating_point() else 1
        given: list[FakeTensor] = []
        try:
            key = (func, _described(args, given), _described(tuple((kwargs or {}).items()), given))
            made = self._known.get(key)
        except TypeError:  # what a key cannot stand for
            return self._unknown(func, types, args, kwargs or {})
        if made is None:
            result = super().dispatch(func, types, args, kwargs)
            if (recipe := _recipe(result, given)) is not None:
                self._known[key] = (type(result), recipe)
            return result
        kind, recipe = made
        outputs = [self._make(each, given) for each in recipe]
        return kind(outputs) if kind in (list, tuple) else outputs[0]

    def _unknown(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors = [it for it in tree_iter((args, kwargs)) if isinstance(it, Tensor)]
        if tensors and not any(isinstance(it, FakeTensor) or it.is_meta for it in tensors):
            return func(*args, **kwargs)
        return super().dispatch(func, types, args, kwargs)

    def _make(self, recipe: Any, given: list[FakeTensor]) -> Any:
        if recipe is None:
            return None
        source, view, dtype, device = recipe
        if view is None:
            return given[source]
        shape, stride, offset = view
        if source is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            made = torch.empty(0, dtype=dtype, device="meta")
            made.set_(given[source].untyped_storage(), offset, shape, stride)
        return FakeTensor(self, made, device)


def _described(value: Any, given: list[FakeTensor]) -> Any:
    """A key for an argument, whose tensors join those that are ``given``.

    Raises:
        TypeError: it is none of what a key can stand for.
    """
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.is_complex():
            raise TypeError
        given.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if kind in (tuple, list):
        return tuple([_described(it, given) for it in value])
    if value is None or kind in _PLAIN:
        return kind, value
    raise TypeError


def _recipe(result: Any, given: list[FakeTensor]) -> Any:
    """How to make a result again: of each tensor the given one that it is or is a view of, or none; and what
    it looks like."""
    storages = {id(it.untyped_storage()): place for place, it in enumerate(given)}
    found: list[Any] = []
    for each in result if type(result) in (tuple, list) else [result]:
        if each is None:
            found.append(None)
            continue
        if type(each) is not FakeTensor or each.constant is not None or each.is_complex():
            return None
        same = [place for place, it in enumerate(given) if it is each]
        if same:
            found.append((same[0], None, None, None))
            continue
        handle = id(each.untyped_storage())
        source, view = storages.get(handle), (each.shape, each.stride(), each.storage_offset())
        if source is None:
            span = 1 + sum((size - 1) * step for size, step in zip(each.shape, each.stride(), strict=True))
            if each.storage_offset() or each.untyped_storage().nbytes() != span * each.itemsize * bool(
                each.numel()
            ):
                return None
            storages[handle] = -1
        elif source < 0:
            return None
        found.append((source, view, each.dtype, each.fake_device))
    return found


def _norm(gradient: Tensor, _: Tensor) -> Tensor:
    """The norm in one operation: by pieces, as on a CPU, it takes half of a fake step's time."""
    return torch.linalg.vector_norm(gradient.flatten(), dtype=torch.float64)


@contextmanager
def fake_run(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    rank: int,
    *,
    param_dtype: torch.dtype,
    target: str = "cpu",
    count: int | None = None,
) -> Iterator[FakeRun]:
    """Build ``rank`` of a run that passed the preflight, on the device ``target``, whose step has ``count``
    micro-batches, by default as many as its memory asks for.

    Nothing is compiled, FSDP's collectives have buffers of their own, and attention is one that a CPU has and
    that keeps as much. Needs no process group, and must not be called where there is one.
    """
    config = _simplified(config, target, cp=layout.cp)
    device = torch.device("cpu")
    batch = _batch(config, layout)
    with pretended(rank, layout.world_size), ExitStack() as stack:
        if target in loss.CHUNK_LOGITS:
            stack.enter_context(mock.patch.dict(loss.CHUNK_LOGITS, cpu=loss.CHUNK_LOGITS[target]))
        stack.enter_context(mock.patch.object(grad_clip, "_chunked_norm", _norm))
        stack.enter_context(mock.patch.object(activation_offload, "HostCopy", _OnTheHost))
        stack.enter_context(mock.patch.object(fsdp, "SKIP_DEVICES", ("cpu",) if target == "cuda" else ()))
        mesh = build_mesh(device, **asdict(layout))
        model_parts = build_model(config, args, mesh, device, param_dtype=param_dtype, seed=0, storage=False)
        if target == "cuda":
            # The loss stays in pieces, whose temporary memory a fused one does not take.
            parts = set(config.training.fused_parts) - {"loss"}
            stack.callback(fused.enable, fused.enable(parts))
        stack.enter_context(_Shapes())
        for model in model_parts.models:
            model.to_empty(device=device)
        if model_parts.connect:
            model_parts.connect()
        named = [*model_parts.named_parameters(), *model_parts.tied_copies()]
        with unset_fake_temporarily():  # which reckons with real numbers, such as offsets
            optimizer = build_optimizer(named, config)
        step = TrainStep(
            model_parts,
            optimizer,
            max_norm=config.training.max_norm,
            device=device,
            in_backward=config.optimizer.early_step_in_backward,
        )
        batches = partial(_batches, config, batch, layout.pp, count or _count(config, batch, layout.pp))
        yield FakeRun(
            model_parts,
            optimizer,
            list(optimizer_tensors(named, optimizer).values()),
            lambda: step(batches(), learning_rate=1e-3),
            lambda: model_parts.backward(
                [model_parts.prepare(each, device) for each in batches()], torch.ones((), dtype=torch.float64)
            ),
        )


def step_memory(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    rank: int,
    *,
    param_dtype: torch.dtype,
    target: str = "cpu",
) -> StepMemory:
    """Find what a step takes of ``rank``'s memory, as :func:`fake_run` has it. A row is one document: where
    it has many, attention on a CPU takes less."""
    with (
        fake_run(config, args, layout, rank, param_dtype=param_dtype, target=target) as run,
        watched(run.model_parts.models, run.optimizer, run.state) as found,
    ):
        run.step()
        memory = found(_ON_THE_HOST if config.training.enable_cpu_offload else ())
        return memory.beside("buffers of transfers", _not_received(config, layout, run.model_parts))


def _not_received(config: Config, layout: ParallelDims, model_parts: ModelParts) -> int:
    """Bytes that a pipeline keeps ready for the transfers of those micro-batches that were left out."""
    if not isinstance(model_parts, Pipeline):
        return 0
    batch = _batch(config, layout)
    left = micro_batches(config, layout) - _count(config, batch, layout.pp)
    ends = (0 in model_parts.stages) + (model_parts.last in model_parts.stages)
    length = config.training.seq_len // layout.cp
    hidden = model_parts._hidden(model_parts.micro_batch, length, "meta")
    return left * (2 * len(model_parts.stages) - ends) * hidden.nbytes


def _simplified(config: Config, target: str, *, cp: int) -> Config:
    attention = config.model.attention
    if target == "cuda" and attention != "sdpa":  # which takes masks of parts of sequences
        attention = "blockwise" if cp > 1 else "sdpa"
    parallelism = config.parallelism
    if not uses_ring(config.parallelism, device=target, documents=config.data.document_mask):
        parallelism = parallelism.model_copy(update={"context_parallel_rotate_method": "allgather"})
    return config.model_copy(
        update={
            "compile": config.compile.model_copy(update={"enable": False}),
            "model": config.model.model_copy(update={"attention": attention}),
            "parallelism": parallelism,
        }
    )


def _batch(config: Config, layout: ParallelDims) -> BatchShape:
    training = config.training
    batch = batch_shape(
        global_batch_size=training.global_batch_size, local_batch_size=training.local_batch_size, dp=layout.dp
    )
    assert batch, "the preflight found that the batch divides"
    return batch


def micro_batches(config: Config, layout: ParallelDims) -> int:
    """Micro-batches of a rank's step."""
    batch = _batch(config, layout)
    if layout.pp == 1:
        return batch.accumulation
    return batch.local * batch.accumulation // config.parallelism.pipeline_parallel_microbatch_size


def _count(config: Config, batch: BatchShape, pp: int) -> int:
    """The micro-batches of the fake step. Of many, so many that memory is that of all: the first, the last
    and one between; in a pipeline two for each rank, where its schedule does not keep all of them."""
    if pp == 1:
        return min(batch.accumulation, 3)
    options = config.parallelism
    count = batch.local * batch.accumulation // options.pipeline_parallel_microbatch_size
    keeps = options.pipeline_parallel_schedule in _KEEP_ALL or options.pipeline_parallel_schedule_csv
    return count if keeps else min(count, 2 * pp)


def _batches(config: Config, batch: BatchShape, pp: int, count: int) -> list[MicroBatch]:
    """The micro-batches of the fake step, of documents where pairs are compared."""
    rows = config.parallelism.pipeline_parallel_microbatch_size if pp > 1 else batch.local
    shape = (rows, config.training.seq_len)
    pairs = config.finetune.objective == "dpo"
    return [
        {
            "tokens": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "positions": None,
            "documents": torch.zeros(shape, dtype=torch.int32) if pairs else None,
        }
        for _ in range(count)
    ]
