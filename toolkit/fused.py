"""Compile each enabled elementwise part of a step into one CUDA kernel, even without compile.enable.

Eager PyTorch reads and writes every element once per operator. inductor compiles an enabled part into a
kernel that reads its inputs and writes its results once. Disabled parts, and all parts on other devices, run
operator by operator; a compiled region includes its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

_enabled: frozenset[str] = frozenset()


def enable(parts: Iterable[str]) -> frozenset[str]:
    """Set the parts that are fused on CUDA (``training.fused_parts``) and return the previous ones."""
    global _enabled
    before, _enabled = _enabled, frozenset(parts)
    return before


def is_enabled(part: str) -> bool:
    """Report whether ``part`` is fused on CUDA."""
    return part in _enabled


class Fused:
    """A tensor function that runs compiled if its first argument is on CUDA and ``part`` is enabled.

    Attributes:
        compiled: the compiled function, on any device. Shapes are static unless ``dynamic``, so that a
            resumed run uses the same kernels.
    """

    def __init__(self, part: str, function: Callable[..., Any], *, dynamic: bool = False):
        self.part, self.function, self.dynamic = part, function, dynamic

    def applies_to(self, x: Any) -> bool:
        """Report whether ``x`` is on CUDA and the part is enabled."""
        return x.is_cuda and self.part in _enabled

    def __call__(self, first: Any, *others: Any) -> Any:
        if self.applies_to(first) and not torch.compiler.is_compiling():
            return self.compiled(first, *others)
        return self.function(first, *others)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.function, fullgraph=True, dynamic=self.dynamic)
