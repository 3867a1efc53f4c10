"""Write model-only checkpoints, reading each tensor only when it is written.

Files have about 1 GiB; at most four are in memory at once. Like a run's saves, they are committed with
hashes, a manifest and one rename. A killed writer leaves a ``step-N.tmp-`` folder, which the next writer or
run removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from toolkit.checkpoint.dcp_storage import CommittingWriter, ContiguousSavePlanner, Files, read_metadata
from toolkit.checkpoint.local_steps import clear, temporary_name
from toolkit.checkpoint.manager import commit_folder, without_crc32
from toolkit.compat import StoragePrefix
from toolkit.errors import CheckpointError
from toolkit.io.locks import LOCK, exclusive_lock
from toolkit.io.work_folder import reject_existing, write_in_progress
from toolkit.launcher.environment import threads
from toolkit.weights.folder_write import Progress
from toolkit.weights.open import MODEL_PREFIX, CheckpointWeights
from toolkit.weights.source import WeightSource
from toolkit.weights.views import in_order, split_into_files

FILE_BYTES = 1 << 30
FILES_AT_ONCE = 4


def write_dcp(
    source: WeightSource,
    out: Path,
    run: Mapping[str, Any],
    *,
    progress: Progress,
    check: Callable[[WeightSource], None] | None = None,
) -> None:
    """Write ``source`` as the checkpoint ``out``, a step-N, with ``run`` (JSON types) in the manifest.

    ``check`` is called with the written weights before they are committed.

    Raises:
        DataError: the step exists, or another process is writing in the folder.
        CheckpointError: it cannot be written; the output is removed.
        ToolkitError: a tensor cannot be read, or ``check`` failed; the output is removed.
    """
    work = temporary_name(out)

    def commit(files: Files, metadata: Metadata) -> None:
        if check:
            check(CheckpointWeights(work, read_metadata(work, files), run))
        commit_folder(work, out, files, metadata, run)

    try:
        with exclusive_lock(out.parent / LOCK):  # the same lock as that of a run that saves there
            reject_existing(out)
            for _ in clear(out.parent):
                pass
            work.mkdir()
            _write(source, CommittingWriter(work, commit), progress)
    except BlockingIOError as error:
        raise write_in_progress(out, error) from None
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error}\n  The incomplete output was removed."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        with suppress(OSError):  # it may not be empty
            out.parent.rmdir()


class _LazySavePlanner(ContiguousSavePlanner):
    """Reads each tensor from the source when it is written."""

    def __init__(self, source: WeightSource, progress: Progress):
        super().__init__()
        self._source, self._progress = source, progress

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor = self._source.read(index.fqn.removeprefix(MODEL_PREFIX))
        self._progress(tensor.nbytes)
        return tensor


def _write(source: WeightSource, writer: CommittingWriter, progress: Progress) -> None:
    tensors = in_order(source)
    planner = _LazySavePlanner(source, progress)
    planner.set_up_planner(
        {
            MODEL_PREFIX + name: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for name, stored in tensors.items()
        },
        is_coordinator=True,
    )
    [plan], metadata = planner.create_global_plan([planner.create_local_plan()])
    items = {item.index.fqn.removeprefix(MODEL_PREFIX): item for item in plan.items}

    def write_file(number: int, names: Iterable[str]) -> list[WriteResult]:
        prefix = StoragePrefix(f"__{number}_")
        file_plan = replace(plan, items=[items[name] for name in names], storage_data=prefix)
        return writer.write_data(file_plan, planner).value()

    files = split_into_files(tensors, FILE_BYTES)
    with without_crc32(), ThreadPoolExecutor(min(threads(), FILES_AT_ONCE)) as pool:
        written = list(pool.map(write_file, range(len(files)), files))
    writer.finish(metadata, written)
