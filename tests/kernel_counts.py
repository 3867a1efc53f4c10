"""Counts the operators that would each launch a kernel."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# They give memory, or another look at it.
WITHOUT_KERNEL = {
    "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty",
    "new_empty_strided", "promote_types",
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts operators, by name, that compute: not views of what there is, nor empty memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in WITHOUT_KERNEL:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
