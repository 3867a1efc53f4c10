"""Count what ranks send, from the collectives and transfers that they ask for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

Sent = dict[str, int]
"""Bytes of whole tensors by operation and ranks, such as "all_gather 0 1"."""

# Operation, and where among the arguments its whole tensor is; None is the result.
_C10D: dict[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
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
    """Adds up what is sent in its block, in groups of several ranks; raises for what it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _NOTHING:
            return result
        if func.namespace == "c10d":
            operation, place = _C10D[name]
            whole = args[place] if isinstance(args[place], torch.Tensor) else args[place][0]
            groups = [each for each in args if isinstance(each, torch.ScriptObject)]
            self._add(operation, dist.ProcessGroup.unbox(groups[0]), whole)
        elif func.namespace == "_c10d_functional":
            operation, where = _FUNCTIONAL[name]
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self._add(operation, group, result if where is None else args[where])
        return result

    def _add(self, operation: str, group: dist.ProcessGroup, whole: torch.Tensor) -> None:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            self.bytes[label(operation, ranks)] += whole.nbytes


def label(operation: str, ranks: Any) -> str:
    return " ".join([operation, *map(str, ranks)])
