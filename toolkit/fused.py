"""Elementwise parts of a step that run as one generated kernel each on CUDA, also without compile.enable.

Eager PyTorch reads and writes all elements once per operator. A part that is ``enabled`` is compiled by
inductor, which reads its inputs and writes its results once. Within a region that is compiled as a whole, on
other devices and where it is not enabled, a part runs operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

_enabled: frozenset[str] = frozenset()


def enable(parts: Iterable[str]) -> frozenset[str]:
    """Choose the parts that are fused on CUDA, those of ``training.fused_parts``; return those that were."""
    global _enabled
    before, _enabled = _enabled, frozenset(parts)
    return before


def is_enabled(part: str) -> bool:
    """Say if ``part`` is fused on CUDA."""
    return part in _enabled


class Fused:
    """``function`` of tensors, compiled where its first argument is on CUDA and ``part`` is enabled.

    Attributes:
        compiled: the compiled form, on any device. Shapes are static unless ``dynamic``, so that kernels are
            the same after a resume.
    """

    def __init__(self, part: str, function: Callable[..., Any], *, dynamic: bool = False):
        self.part, self.function, self.dynamic = part, function, dynamic

    def takes(self, x: Any) -> bool:
        """Whether ``x`` is on CUDA and the part is enabled."""
        return x.is_cuda and self.part in _enabled

    def __call__(self, first: Any, *others: Any) -> Any:
        if self.takes(first) and not torch.compiler.is_compiling():
            return self.compiled(first, *others)
        return self.function(first, *others)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        return torch.compile(self.function, fullgraph=True, dynamic=self.dynamic)
