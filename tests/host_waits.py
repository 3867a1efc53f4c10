"""Finds on a CPU what would make a host wait for its GPU, or its GPU for the host."""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
# Their results, or the sizes of these, are numbers of the host.
READING = {
    "_local_scalar_dense", "bincount", "equal", "is_nonzero", "masked_select", "nonzero", "unique_dim",
    "unique_consecutive", "_unique2",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
MASKS = (torch.bool, torch.uint8)
# Of a tensor that is on the CPU already these do nothing that an operator would show.
TO_HOST = {Tensor.tolist, Tensor.cpu, Tensor.numpy}
# Page-locked or not, what is on the host is copied before they return.
TO_DEVICE = {torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.cuda, Tensor.new_tensor}


class HostWaits:
    """Records, while it is entered, what on CUDA would wait for the device: ``found`` has names, each with
    the innermost function of the toolkit that it comes from.

    Reads of a tensor's numbers, sizes that depend on them (``nonzero``, indexing by a mask) and copies of
    host data that are not asked to be non-blocking. Not seen: ``to(device)`` of what is on a CPU on purpose,
    since here all is, and what runs within operators of DTensor, whose names are in ``on_dtensors``: the host
    takes tens of microseconds for each.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self.on_dtensors: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> HostWaits:
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def add(self, name: str) -> None:
        self.found.append((name, _place()))


def _place() -> str:
    own = str(ROOT / "toolkit")
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(own)]
    return f"{Path(frames[-1].filename).relative_to(ROOT)} {frames[-1].name}" if frames else "elsewhere"


class _Functions(TorchFunctionMode):
    def __init__(self, waits: HostWaits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TO_HOST or func in TO_DEVICE:
            self.waits.add(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, waits: HostWaits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in READING or (name in INDEXING and _by_mask(args[1])):
            self.waits.add(name)
        if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], Tensor):
            self.waits.add(name)
        if any(issubclass(kind, DTensor) for kind in types):
            self.waits.on_dtensors.add(name)
        return func(*args, **kwargs)


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in MASKS for index in indices)
