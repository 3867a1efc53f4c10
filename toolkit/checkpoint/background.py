"""Lets training go on while a checkpoint is written: what is to be saved is copied, a thread does the rest.

The copies are the price: as many bytes of host memory as the rank's part of the checkpoint, made at the
first save and used again by each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Thread

from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class Background:
    """One write at a time. ``pinned`` has a GPU copy into pages that stay in memory, which is faster."""

    def __init__(self, *, pinned: bool = False):
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, on the CPU, sharded as they are; valid until the next call."""
        copies = self._stager.stage(dict(tensors))
        assert isinstance(copies, dict)
        return copies

    def start(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread of its own, which ends with the process."""
        assert self._thread is None, "the last write has not been ended"
        self._thread = Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # for whoever ends the write
            self._failure = error

    def end(self, *, wait: bool) -> None:
        """Raise what the write that has ended failed with; ``wait`` until it has. Without one, nothing."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        if failure:
            raise failure
