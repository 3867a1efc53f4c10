"""Writes and deletes checkpoints in object storage: the manifest, last to come and first to go, makes a step.

The functions are those of :mod:`toolkit.checkpoint.local_steps`. Nothing is renamed there: files go up under
their final names, and what has no manifest does not exist for loading, retention and "latest".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from toolkit.checkpoint.manifest import MANIFEST, step_folder
from toolkit.models.on_disk import EXPORTS
from toolkit.storage.remote_calls import StorageError
from toolkit.storage.remote_path import RemotePath, check_size, end_uploads

_STEP = re.compile(r"step-\d+")
_AT_ONCE = 16


def begin(final: RemotePath) -> RemotePath:
    """Return where the files of ``final`` are written, after a checkpoint of before has gone from there."""
    _remove(final)
    return final


def commit(temporary: RemotePath, final: RemotePath, manifest: Mapping[str, Any]) -> None:
    """Look if all files are there in their size, then write the manifest, which makes them a checkpoint.

    Raises:
        StorageError: a file is not there, or somebody else has committed this step.
    """
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        files = manifest["files"].items()
        list(threads.map(lambda file: check_size(final / file[0], file[1]["bytes"]), files))
    try:
        (final / MANIFEST).write_new(json.dumps(manifest, indent=1).encode())
    except FileExistsError:
        rule = "another run has committed this step since this one began to write it"
        raise StorageError(
            f"{final} cannot be used: {rule}\n  fix:  give each run a place of its own"
        ) from None


def discard(temporary: RemotePath) -> None:
    """Remove what a failed save has written, if the store lets us; else the next start of a run does."""
    try:
        if not (temporary / MANIFEST).exists():
            _remove(temporary)
    except StorageError:
        pass


def delete(folder: RemotePath, step: int) -> None:
    """Delete the checkpoint of ``step``, its manifest first: half deleted, it must not look committed."""
    _remove(step_folder(folder, step))  # type: ignore[arg-type]


def leftovers(folder: RemotePath) -> list[RemotePath]:
    """Steps without a manifest: saves and deletions that did not come to their end."""
    found = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
    return [path for path in found if not (path / MANIFEST).exists()]


def clear(folder: RemotePath) -> Iterator[str]:
    """Remove the leftovers and end what killed uploads have begun, of exports too; tell of each."""
    for path in leftovers(folder):
        _remove(path)
        yield f"removed {path.name}, left by a save that was killed"
    if ended := end_uploads(folder) + end_uploads(folder / EXPORTS):
        yield f"ended {ended} uploads, left by a save that was killed"


def _remove(path: RemotePath) -> None:
    path.remove_tree(first=(MANIFEST,))
