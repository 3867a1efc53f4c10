"""Write snapshots of the CUDA allocator's history, periodically and on out-of-memory errors."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import TracebackType

import torch

from toolkit.compat import memory_snapshot, record_memory_history

_ENTRIES = 100_000
"""Maximum number of allocations and frees in a snapshot, as in torchtitan: at most a few hundred MB."""


class MemorySnapshots:
    """Writes each rank's allocations with their stacks, every ``freq`` steps and on out-of-memory errors.

    View the files, ``<folder>/iteration_<step>/rank<rank>_memory_snapshot.pickle``, at
    https://pytorch.org/memory_viz. After an out-of-memory error, the folder is ``iteration_<step>_exit``,
    with the last completed step. CUDA only: torch does not record such a history on the CPU.
    """

    def __init__(self, folder: Path, *, freq: int, rank: int):
        self._folder, self._freq, self._rank = folder, freq, rank
        self._step = 0

    def __enter__(self) -> MemorySnapshots:
        record_memory_history(max_entries=_ENTRIES)
        return self

    def after_step(self, step: int) -> None:
        self._step = step
        if step % self._freq == 0:
            self._dump(f"iteration_{step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._dump(f"iteration_{self._step}_exit")
        record_memory_history(enabled=None)

    def _dump(self, name: str) -> None:
        path = self._folder / name / f"rank{self._rank}_memory_snapshot.pickle"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                pickle.dump(memory_snapshot(), file)
        except OSError as error:
            print(f"the memory snapshot {path} cannot be written: {error}", flush=True)
