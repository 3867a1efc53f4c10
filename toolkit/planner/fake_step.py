"""Run one step of one rank on fake tensors: the run's model, schedule and optimizer, but without storage and
other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit import fused
from toolkit.build import build_model
from toolkit.compat import FakeTensor, FakeTensorMode, local_scalar, tree_iter, unset_fake_temporarily
from toolkit.config import Config
from toolkit.data.batch_size import BatchShape, batch_shape
from toolkit.data.preference_rows import MISMATCHED
from toolkit.finetune.preferences import DPOObjective
from toolkit.hardware import simulate
from toolkit.models.common.args import ModelArgs
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.activation_offload import HostCopy, OffloadedInput
from toolkit.parallel.dims import ParallelDims, uses_ring
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch
from toolkit.parallel.pipeline_parallel import Pipeline
from toolkit.planner.allocations import StepMemory, track_memory
from toolkit.planner.layouts import samples
from toolkit.planner.memory import fake_world
from toolkit.train_step import TrainStep

_SCALAR_TYPES = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_ALL_FORWARDS_FIRST = ("GPipe", "LoopedBFS")
"""Schedules that run all forwards before the first backward."""
_OFFLOADED = ("parameters", "gradients", "optimizer state", "work of the update")
"""Parts that ``training.enable_cpu_offload`` stores in CPU memory."""


@dataclass(frozen=True)
class FakeRun:
    """A rank before its step. ``state`` contains the optimizer's tensors; ``passes`` runs only the forwards
    and backwards of ``step``."""

    model_parts: ModelParts
    optimizer: Optimizer
    state: list[Tensor]
    step: Callable[[], Any]
    passes: Callable[[], Any]


class _FakeHostCopy(HostCopy):
    """An offloaded tensor that takes no device memory."""

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.device_copy = None

    def fetch(self) -> None:
        if self.device_copy is None:
            self.device_copy = torch.empty(self.shape, dtype=self.dtype)


class _CachedFakeMode(FakeTensorMode):
    """Fake tensor mode that caches operations by the shapes of their inputs.

    torch's own cache is three times slower and would take most of the time of a fake step.
    """

    _cache: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func is local_scalar.default and type(args[0]) is FakeTensor:
            return 1.0 if args[0].is_floating_point() else 1
        inputs: list[FakeTensor] = []
        try:
            key = (func, _cache_key(args, inputs), _cache_key(tuple((kwargs or {}).items()), inputs))
            cached = self._cache.get(key)
        except TypeError:  # an argument cannot be a key
            return self._dispatch_uncached(func, types, args, kwargs or {})
        if cached is None:
            result = super().dispatch(func, types, args, kwargs)
            if (recipe := _recipe(result, inputs)) is not None:
                self._cache[key] = (type(result), recipe)
            return result
        kind, recipe = cached
        outputs = [self._rebuild(each, inputs) for each in recipe]
        return kind(outputs) if kind in (list, tuple) else outputs[0]

    def _dispatch_uncached(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors = [it for it in tree_iter((args, kwargs)) if isinstance(it, Tensor)]
        if tensors and not any(isinstance(it, FakeTensor) or it.is_meta for it in tensors):
            return func(*args, **kwargs)
        return super().dispatch(func, types, args, kwargs)

    def _rebuild(self, recipe: Any, inputs: list[FakeTensor]) -> Any:
        if recipe is None:
            return None
        source, view, dtype, device = recipe
        if view is None:
            return inputs[source]
        shape, stride, offset = view
        if source is None:
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            tensor = torch.empty(0, dtype=dtype, device="meta")
            tensor.set_(inputs[source].untyped_storage(), offset, shape, stride)
        return FakeTensor(self, tensor, device)


def _cache_key(value: Any, inputs: list[FakeTensor]) -> Any:
    """Return a cache key for an argument; its tensors are appended to ``inputs``.

    Raises:
        TypeError: the argument cannot be a key.
    """
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.is_complex():
            raise TypeError
        inputs.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if kind in (tuple, list):
        return tuple([_cache_key(it, inputs) for it in value])
    if value is None or kind in _SCALAR_TYPES:
        return kind, value
    raise TypeError


def _recipe(result: Any, inputs: list[FakeTensor]) -> Any:
    """Return a recipe to rebuild a result: for each tensor its metadata and, if it is an input or a view of
    one, the input's index; None if it cannot be rebuilt."""
    storages = {id(it.untyped_storage()): place for place, it in enumerate(inputs)}
    found: list[Any] = []
    for each in result if type(result) in (tuple, list) else [result]:
        if each is None:
            found.append(None)
            continue
        if type(each) is not FakeTensor or each.constant is not None or each.is_complex():
            return None
        same = [place for place, it in enumerate(inputs) if it is each]
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
    expert_load: float = 1.0,
) -> Iterator[FakeRun]:
    """Build ``rank`` of a run that passed the preflight for the device type ``target``.

    The run's step has ``count`` micro-batches; by default, as many as reach the peak memory of the whole
    step. Nothing is compiled, FSDP's collectives have separate buffers, and attention is a CPU implementation
    that saves the same tensors. Call this without a process group.
    """
    config = _simplify(config, target, cp=layout.cp, sinks=args.sinks)
    device = torch.device("cpu")
    batch = _batch(config, layout)
    with fake_world(rank, layout.world_size), ExitStack() as stack:
        stack.enter_context(simulate(target, expert_load=expert_load))
        mesh = build_mesh(device, **asdict(layout))
        model_parts = build_model(config, args, mesh, device, param_dtype=param_dtype, seed=0, storage=False)
        if target == "cuda":
            # The chunked loss includes temporary memory, which the fused loss does not use.
            parts = set(config.training.fused_parts) - {"loss"}
            stack.callback(fused.enable, fused.enable(parts))
        stack.enter_context(_CachedFakeMode())
        for model in (*model_parts.models, *model_parts.objective.models):
            model.to_empty(device=device)
            for module in model.modules():
                if isinstance(module, OffloadedInput):
                    module.host_copy = _FakeHostCopy
        if model_parts.connect:
            model_parts.connect()
        if isinstance(model_parts.objective, DPOObjective) and config.finetune.stores_reference:
            width = len(model_parts.objective.columns)
            model_parts.objective.stored = torch.zeros(1, width, dtype=torch.float64)
        parameters = [*model_parts.named_parameters(), *model_parts.tied_copies()]
        with unset_fake_temporarily():  # it computes with real values, such as offsets
            optimizer = build_optimizer(parameters, config, n_layers=args.n_layers)
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
            list(optimizer_tensors(parameters, optimizer).values()),
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
    expert_load: float = 1.0,
) -> StepMemory:
    """Measure the memory of a step of ``rank`` in a :func:`fake_run`, whose experts get ``expert_load`` times
    the mean of rows. A row is one document; with several documents, attention on a CPU takes less memory."""
    options: dict[str, Any] = {"param_dtype": param_dtype, "target": target, "expert_load": expert_load}
    with ExitStack() as stack:
        run = stack.enter_context(fake_run(config, args, layout, rank, **options))
        models = [*run.model_parts.models, *run.model_parts.objective.models]
        summarize = stack.enter_context(track_memory(models, run.optimizer, run.state))
        run.step()
        memory = summarize(_OFFLOADED if config.training.enable_cpu_offload else ())
        return memory.with_part(
            "buffers of transfers", _unused_receive_buffers(config, layout, run.model_parts)
        )


def _unused_receive_buffers(config: Config, layout: ParallelDims, model_parts: ModelParts) -> int:
    """Return the bytes of a pipeline's receive buffers for the micro-batches omitted in the fake step."""
    if not isinstance(model_parts, Pipeline):
        return 0
    batch = _batch(config, layout)
    left = samples(config, layout)[1] - _count(config, batch, layout.pp)
    ends = (0 in model_parts.stages) + (model_parts.last in model_parts.stages)
    length = config.training.seq_len // layout.cp
    hidden = model_parts._hidden(model_parts.micro_batch, length, "meta")
    return left * (2 * len(model_parts.stages) - ends) * hidden.nbytes


def _simplify(config: Config, target: str, *, cp: int, sinks: bool) -> Config:
    attention = config.model.attention
    if target == "cuda" and attention != "sdpa":  # SDPA accepts masks for parts of sequences
        attention = "blockwise" if cp > 1 or sinks else "sdpa"
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
    batch = batch_shape(config.training, dp=layout.dp)
    assert batch, "the preflight checks that the batch divides"
    return batch


def _count(config: Config, batch: BatchShape, pp: int) -> int:
    """Return the number of micro-batches in the fake step, the smallest with the peak memory of all: the
    first, the last and one in between; in a pipeline two per rank, unless its schedule runs all forwards
    first. Bitwise sums need all micro-batches."""
    options, grows = config.parallelism, config.debug.bitwise_data_parallel
    if pp == 1:
        return batch.accumulation if grows else min(batch.accumulation, 3)
    count = batch.local * batch.accumulation // options.pipeline_parallel_microbatch_size
    all_alive = grows or options.pipeline_parallel_schedule in _ALL_FORWARDS_FIRST
    return count if all_alive or options.pipeline_parallel_schedule_csv else min(count, 2 * pp)


def _batches(config: Config, batch: BatchShape, pp: int, count: int) -> list[MicroBatch]:
    """Return the batches of the fake step, of ``count`` micro-batches; for pairs of answers they have
    document indices."""
    rows = config.parallelism.pipeline_parallel_microbatch_size if pp > 1 else batch.local
    if count * rows % batch.local == 0:  # as many rows as a run's batches, which a pipeline splits
        rows, count = batch.local, count * rows // batch.local
    shape = (rows, config.training.seq_len)
    pairs = config.finetune.compares

    def fields(prefix: str = "") -> MicroBatch:
        return {
            f"{prefix}tokens": torch.zeros(shape, dtype=torch.int64),
            f"{prefix}labels": torch.zeros(shape, dtype=torch.int64),
            f"{prefix}positions": torch.zeros(shape, dtype=torch.int64) if prefix else None,
            f"{prefix}documents": torch.zeros(shape, dtype=torch.int32) if pairs else None,
        }

    def beside() -> MicroBatch:
        batch: MicroBatch = {}
        if config.finetune.stores_reference:
            batch["conversations"] = torch.zeros(shape, dtype=torch.int64)
        if config.finetune.unpaired:
            batch |= fields(MISMATCHED) | {"desirable": torch.zeros(shape, dtype=torch.bool)}
        if config.finetune.objective == "reward":
            batch["margin"] = torch.zeros(shape)
        return batch

    return [fields() | beside() for _ in range(count)]
