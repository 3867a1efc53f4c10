"""Track the memory of a step: the live tensors at each moment, and their peak.

Every storage that an operation allocates is recorded with its size, its purpose and the moment of the step.
Memory that an operation frees before it returns is not tracked. This works on real tensors and on those of
:mod:`toolkit.planner.fake_step`, which have sizes but no storage.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.compat import TorchDispatchMode, backward_task, local_tensor, tree_iter, watch_resizes
from toolkit.distributed.dtensor import clean_name, local
from toolkit.models.common.block_output import BlockOutput

_FSDP = "/fsdp/_fully_shard/"
_DEPTH = 30
"""Python frames to search for FSDP's, because torch calls its hooks through a few frames of its own."""


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step in bytes.

    Attributes:
        peak: peak memory.
        moment: when the peak occurs, such as "backward of layers.5".
        parts: the peak by purpose: parameters, gradients, optimizer state, gathered parameters,
            reductions, activations (saved for backward, or temporary), workspace of backward, workspace
            of the update.
        curve: the moments in order, each with its peak by purpose.
    """

    peak: int
    moment: str
    parts: dict[str, int]
    curve: list[tuple[str, dict[str, int]]]

    def with_part(self, part: str, size: int) -> StepMemory:
        """Add ``size`` bytes of another ``part`` throughout the step."""
        if not size:
            return self
        curve = [(moment, parts | {part: size}) for moment, parts in self.curve]
        return StepMemory(self.peak + size, self.moment, self.parts | {part: size}, curve)


def fsdp_functions() -> Iterator[str]:
    """Yield the names of the running functions of FSDP, innermost first."""
    frame: Any = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return
        if _FSDP in frame.f_code.co_filename:
            yield frame.f_code.co_name
        frame = frame.f_back


class Allocations(TorchDispatchMode):
    """Tracks storages inside its context; ``existing`` tensors, by part, count from the start."""

    def __init__(self, existing: dict[str, Iterable[Tensor]]):
        super().__init__()
        self._parts: list[str] = []  # part of each storage, in the order of allocation
        self._events: list[tuple[int, int, str]] = []  # storage, change in bytes, moment
        self._sizes: dict[int, tuple[int, int]] = {}  # handle of a live storage → storage, bytes
        self.moment = "start"
        self._existing = {part: [local(tensor) for tensor in tensors] for part, tensors in existing.items()}
        for part, tensors in self._existing.items():
            for tensor in tensors:
                self._track(tensor, part)

    def label(self, tensors: Iterable[Tensor], part: str) -> None:
        """Count these tensors as ``part``, regardless of the operation that allocated them."""
        for tensor in tensors:
            known = self._sizes.get(id(local(tensor).untyped_storage()))
            if known:
                self._parts[known[0]] = part

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # half of all calls on fake tensors
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._track(tensor)
        return result

    def __enter__(self) -> Allocations:
        self._undo = watch_resizes(
            self._track_storage
        )  # FSDP frees storages by resizing them, which dispatches no operation
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo()

    def _track(self, tensor: Tensor, part: str = "") -> None:
        tensor = storage_tensor(tensor)
        if tensor.is_sparse or type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            return  # its inner tensors are tracked themselves
        self._track_storage(tensor.untyped_storage(), part)

    def _track_storage(self, storage: torch.UntypedStorage, part: str = "") -> None:
        handle, size = id(storage), storage.nbytes()
        number, before = self._sizes.get(handle, (-1, 0))
        if number < 0:
            number = len(self._parts)
            self._parts.append(part or self._part())
            weakref.finalize(storage, self._freed, handle)
        if size != before or handle not in self._sizes:
            self._sizes[handle] = (number, size)
            self._events.append((number, size - before, self.moment))

    def _freed(self, handle: int) -> None:
        number, size = self._sizes.pop(handle)
        self._events.append((number, -size, self.moment))

    def _part(self) -> str:
        for name in fsdp_functions():
            if name in ("foreach_reduce", "post_backward"):
                return "reductions"
            if name in ("unshard", "foreach_all_gather", "wait_for_unshard"):
                return "gathered parameters"
        if backward_task() != -1:
            return "work of backward"
        return "work of the update" if self.moment == "update" else "activations"

    def live_bytes(self, parts: Iterable[str]) -> int:
        """Return the current bytes of these parts."""
        return sum(size for number, size in self._sizes.values() if self._parts[number] in parts)

    def peaks(self, parts: Iterable[str]) -> dict[str, int]:
        """Return the peak bytes of these parts at each moment."""
        total = 0
        peaks: dict[str, int] = {}
        for number, change, moment in self._events:
            total += change if self._parts[number] in parts else 0
            peaks[moment] = max(peaks.get(moment, total), total)
        return peaks

    def summarize(self, without: Collection[str] = ()) -> StepMemory:
        """Summarize the memory of the step so far, ``without`` these parts."""
        now: Counter[str] = Counter()
        total = peak = 0
        at: Counter[str] = Counter()
        when = "start"
        curve: list[tuple[str, int, dict[str, int]]] = []
        for number, change, moment in self._events:
            if self._parts[number] in without:
                continue
            now[self._parts[number]] += change
            total += change
            if not curve or curve[-1][0] != moment:
                curve.append((moment, -1, {}))
            if total > curve[-1][1]:
                curve[-1] = (moment, total, dict(now))
            if total > peak:
                peak, at, when = total, now.copy(), moment
        parts = {part: size for part, size in at.items() if size}
        return StepMemory(peak, when, parts, [(moment, kept) for moment, _, kept in curve])


def storage_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor that owns the storage: the local shard of a DTensor. Unlike ``detach``, this
    dispatches no operation."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


@contextmanager
def track_memory(
    models: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    state: Iterable[Tensor],
    make_tracker: Callable[[dict[str, Iterable[Tensor]]], Allocations] = Allocations,
) -> Iterator[Callable[..., StepMemory]]:
    """Track the memory of steps inside the context and yield a function that summarizes it. ``state`` is the
    optimizer state, allocated before; ``make_tracker`` creates the tracker."""
    models = list(models)
    parameters = [parameter for model in models for parameter in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    tracker = make_tracker({"parameters": parameters, "buffers": buffers, "optimizer state": state})
    with ExitStack() as stack:
        for model in models:
            for name, module in _modules_to_watch(model):
                stack.enter_context(_record_moments(module, name, tracker))

        def before_update(*_: Any) -> None:
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            tracker.label(grads, "gradients")
            tracker.moment = "update"

        removed = optimizer.register_step_pre_hook(before_update)
        stack.callback(removed.remove)
        stack.enter_context(tracker)
        yield tracker.summarize


def _modules_to_watch(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        name = clean_name(f"{name}.").removesuffix(".")
        if name and name.count(".") == name.startswith("layers."):
            yield name, module


@contextmanager
def _record_moments(module: nn.Module, name: str, tracker: Allocations) -> Iterator[None]:
    """Record the moments of a module's forward and backward; backward begins with the gradient of its
    output."""

    def forward(*_: Any) -> None:
        if backward_task() == -1:
            tracker.moment = f"forward of {name}"

    def output(_: Any, __: Any, result: Any) -> None:
        result = result.hidden if isinstance(result, BlockOutput) else result
        if isinstance(result, Tensor) and result.requires_grad and backward_task() == -1:
            result.register_hook(backward)

    def backward(_: Tensor) -> None:
        tracker.moment = f"backward of {name}"

    hooks = [module.register_forward_pre_hook(forward), module.register_forward_hook(output)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
