"""The tensors that live at each moment of a step, and the largest sum of their bytes.

Every storage that an operation makes is noted with its size, what it is for and the moment of its birth; what
an operation frees before it returns is not seen. It works alike on real tensors and on those of
:mod:`toolkit.planner.fake_step`, which have sizes and no storage.
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

_FSDP = "/fsdp/_fully_shard/"
_DEPTH = 30
"""Python frames that are searched for FSDP's: behind its hooks are a few of torch's."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes that live over a step.

    Attributes:
        peak: the most at one time.
        moment: when that is, such as "backward of layers.5".
        parts: its bytes by what they are for: parameters, gradients, optimizer state, gathered parameters,
            reductions, activations (kept for backward, or just made), work of backward, work of the update.
        curve: the moments in order, with the most bytes of each by part.
    """

    peak: int
    moment: str
    parts: dict[str, int]
    curve: list[tuple[str, dict[str, int]]]

    def beside(self, part: str, size: int) -> StepMemory:
        """The same with ``size`` bytes of another ``part`` throughout."""
        if not size:
            return self
        curve = [(moment, parts | {part: size}) for moment, parts in self.curve]
        return StepMemory(self.peak + size, self.moment, self.parts | {part: size}, curve)


def fsdp_functions() -> Iterator[str]:
    """Names of the functions of FSDP that are running, the innermost first."""
    frame: Any = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return
        if _FSDP in frame.f_code.co_filename:
            yield frame.f_code.co_name
        frame = frame.f_back


class Allocations(TorchDispatchMode):
    """Notes the storages that live while it is entered. ``held`` are those from before, by their part."""

    def __init__(self, held: dict[str, Iterable[Tensor]]):
        super().__init__()
        self._parts: list[str] = []  # of each storage, in the order of birth
        self._events: list[tuple[int, int, str]] = []  # storage, more bytes, moment
        self._sizes: dict[int, tuple[int, int]] = {}  # handle of a living storage → storage, bytes
        self.moment = "start"
        self._held = {part: [local(tensor) for tensor in tensors] for part, tensors in held.items()}
        for part, tensors in self._held.items():
            for tensor in tensors:
                self._note(tensor, part)

    def name(self, tensors: Iterable[Tensor], part: str) -> None:
        """Say that these tensors, whatever made them, are a ``part``."""
        for tensor in tensors:
            known = self._sizes.get(id(local(tensor).untyped_storage()))
            if known:
                self._parts[known[0]] = part

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # of a fake tensor, half of all calls
            return args[0].fake_device
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result

    def __enter__(self) -> Allocations:
        self._undo = watch_resizes(self._note_storage)  # no operation, and FSDP's way to free
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undo()

    def _note(self, tensor: Tensor, part: str = "") -> None:
        tensor = storing(tensor)
        if tensor.is_sparse or type(tensor) is not Tensor and hasattr(tensor, "__tensor_flatten__"):
            return  # the tensors that it is made of are noted by themselves
        self._note_storage(tensor.untyped_storage(), part)

    def _note_storage(self, storage: torch.UntypedStorage, part: str = "") -> None:
        handle, size = id(storage), storage.nbytes()
        number, before = self._sizes.get(handle, (-1, 0))
        if number < 0:
            number = len(self._parts)
            self._parts.append(part or self._part())
            weakref.finalize(storage, self._gone, handle)
        if size != before or handle not in self._sizes:
            self._sizes[handle] = (number, size)
            self._events.append((number, size - before, self.moment))

    def _gone(self, handle: int) -> None:
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

    def living(self, parts: Iterable[str]) -> int:
        """Bytes of these parts that live now."""
        return sum(size for number, size in self._sizes.values() if self._parts[number] in parts)

    def most(self, parts: Iterable[str]) -> dict[str, int]:
        """The most bytes of these parts at one time, by moment."""
        total = 0
        found: dict[str, int] = {}
        for number, change, moment in self._events:
            total += change if self._parts[number] in parts else 0
            found[moment] = max(found.get(moment, total), total)
        return found

    def found(self, without: Collection[str] = ()) -> StepMemory:
        """Add up what was noted until now, ``without`` these parts."""
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


def storing(tensor: Tensor) -> Tensor:
    """The tensor with the storage: of a DTensor this rank's part. No operation, as ``detach`` would be."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


@contextmanager
def watched(
    models: Iterable[nn.Module],
    optimizer: torch.optim.Optimizer,
    state: Iterable[Tensor],
    noting: Callable[[dict[str, Iterable[Tensor]]], Allocations] = Allocations,
) -> Iterator[Callable[..., StepMemory]]:
    """Note the tensors of the steps inside; gives a function of what was found. ``state`` is the optimizer's,
    which is made before; ``noting`` makes what notes."""
    models = list(models)
    parameters = [parameter for model in models for parameter in model.parameters()]
    buffers = [buffer for model in models for buffer in model.buffers()]
    noted = noting({"parameters": parameters, "buffers": buffers, "optimizer state": state})
    with ExitStack() as stack:
        for model in models:
            for name, module in _named(model):
                stack.enter_context(_moments(module, name, noted))

        def before_update(*_: Any) -> None:
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            noted.name(grads, "gradients")
            noted.moment = "update"

        removed = optimizer.register_step_pre_hook(before_update)
        stack.callback(removed.remove)
        stack.enter_context(noted)
        yield noted.found


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        name = clean_name(f"{name}.").removesuffix(".")
        if name and name.count(".") == name.startswith("layers."):
            yield name, module


@contextmanager
def _moments(module: nn.Module, name: str, noted: Allocations) -> Iterator[None]:
    """Tell the moments of a module's forward and of its backward, which begins with its output's gradient."""

    def forward(*_: Any) -> None:
        if backward_task() == -1:
            noted.moment = f"forward of {name}"

    def output(_: Any, __: Any, result: Any) -> None:
        if isinstance(result, Tensor) and result.requires_grad and backward_task() == -1:
            result.register_hook(backward)

    def backward(_: Tensor) -> None:
        noted.moment = f"backward of {name}"

    hooks = [module.register_forward_pre_hook(forward), module.register_forward_hook(output)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
