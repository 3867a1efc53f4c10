"""Count what ranks send, from the collectives and transfers that they ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.cpu.shared_memory import SharedMemory

Sent = dict[str, int]
"""Bytes of whole tensors by operation and ranks, such as "all_gather 0 1"."""

# Operation, and where among the arguments its whole tensor is; None is the result.
_C10D: dict[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
}
_FUNCTIONAL: dict[str, tuple[str, int | None]] = {
    "all_gather_into_tensor": ("all_gather", None),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_to_all_single": ("send", 0),
}
_NOTHING = {"recv_", "wait_tensor", "_wrap_tensor_autograd"}
"""The other end of a transfer, and what sends nothing."""


class Traffic(TorchDispatchMode):
    """Adds up what is sent in its block, in groups of several ranks; raises for what it does not know.

    What FSDP exchanges through shared memory is counted as the collective that it stands for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.hide = False
        self.stack = ExitStack()

    def __enter__(self) -> Traffic:
        self.stack.enter_context(
            patch.multiple(
                SharedMemory, allocate=self._hidden(SharedMemory.allocate), meet=self._meet(SharedMemory.meet)
            )
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.close()

    def _hidden(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose own collectives are not counted."""

        def hidden(*args: Any, **kwargs: Any) -> Any:
            before, self.hide = self.hide, True
            try:
                return function(*args, **kwargs)
            finally:
                self.hide = before

        return hidden

    def _meet(self, meet: Callable[..., Any]) -> Callable[..., Any]:
        meet = self._hidden(meet)

        def counted(memory: SharedMemory, operation: str, size: int) -> dist.Work:
            if operation != "allocate":
                self._add(operation, memory.group, size)
            return meet(memory, operation, size)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _NOTHING or self.hide:
            return result
        if func.namespace == "c10d":
            operation, place = _C10D[name]
            whole = args[place] if isinstance(args[place], torch.Tensor) else args[place][0]
            groups = [each for each in args if isinstance(each, torch.ScriptObject)]
            self._add(operation, dist.ProcessGroup.unbox(groups[0]), whole.nbytes)
        elif func.namespace == "_c10d_functional":
            operation, where = _FUNCTIONAL[name]
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self._add(operation, group, (result if where is None else args[where]).nbytes)
        return result

    def _add(self, operation: str, group: dist.ProcessGroup, size: int) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            self.bytes[label(operation, ranks)] += size


def label(operation: str, ranks: Any) -> str:
    return " ".join([operation, *map(str, ranks)])
