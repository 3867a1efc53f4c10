"""torch.compile, block by block: one graph serves every block, and FSDP's hooks stay outside of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import callback
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from toolkit.models.llama.model import Llama


@dataclass(frozen=True)
class Compiling:
    """What to compile ("model", "loss") and how."""

    components: tuple[str, ...] = ("model", "loss")
    backend: str = "inductor"
    fullgraph: bool = True


def use_cache(folder: Path) -> None:
    """Keep compiled code in ``folder``, unless TORCHINDUCTOR_CACHE_DIR names another.

    Call before anything is compiled. Entries are keyed by what they were compiled from and written by
    rename, so that ranks and runs may share a folder.
    """
    # torch sets the variable to its own default when torch._dynamo is imported, by whatever comes first.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def apply_compile(model: Llama, options: Compiling) -> None:
    """Compile in place, each block by itself, and the function that the head calls for a chunk of loss.

    Shapes are static: automatically dynamic ones could change kernels between a run and its resume.
    """
    compiled: Callable[[Any], Any] = partial(
        torch.compile, backend=options.backend, fullgraph=options.fullgraph, dynamic=False
    )
    if "model" in options.components:
        for name, block in list(model.layers.items()):
            model.layers[name] = compiled(block)
    if "loss" in options.components and model.output is not None:
        model.output.loss = compiled(model.output.loss)


class CompileClock:
    """How long this process spends on compiling, from now on: backward graphs, which are compiled when
    first needed, and the reading of cached ones included."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started = 0.0
        callback.on_compile_start(self._start)
        callback.on_compile_end(self._end)

    def _start(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _end(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
