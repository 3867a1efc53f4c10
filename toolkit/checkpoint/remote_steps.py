"""Commit and delete checkpoints in object storage: the manifest is written last and deleted first.

The functions match those of :mod:`toolkit.checkpoint.local_steps`. Nothing is renamed: files are uploaded
under their final names, and loading, retention and "latest" ignore steps without a manifest.
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
from toolkit.storage.remote_path import RemotePath, abort_uploads, check_size

_STEP = re.compile(r"step-\d+")
_AT_ONCE = 16


def begin(final: RemotePath) -> RemotePath:
    """Remove any earlier checkpoint at ``final``, and return the path for the new files."""
    _remove(final)
    return final


def commit(temporary: RemotePath, final: RemotePath, manifest: Mapping[str, Any]) -> None:
    """Check that all files exist with their full size, then write the manifest, which commits the checkpoint.

    Raises:
        StorageError: a file is missing, or another run has committed this step.
    """
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        files = manifest["files"].items()
        list(threads.map(lambda file: check_size(final / file[0], file[1]["bytes"]), files))
    try:
        (final / MANIFEST).write_new(json.dumps(manifest, indent=1).encode())
    except FileExistsError:
        rule = "another run has committed this step since this one began to write it"
        raise StorageError(f"{final} cannot be used: {rule}\n  fix:  give each run its own folder") from None


def discard(temporary: RemotePath) -> None:
    """Remove the files of a failed save if the store allows it; otherwise the next start of a run does."""
    try:
        if not (temporary / MANIFEST).exists():
            _remove(temporary)
    except StorageError:
        pass


def delete(folder: RemotePath, step: int) -> None:
    """Delete the checkpoint of ``step``, manifest first, so that a half-deleted one never looks committed."""
    _remove(step_folder(folder, step))  # type: ignore[arg-type]


def leftovers(folder: RemotePath) -> list[RemotePath]:
    """Return the steps without a manifest: interrupted saves and deletions."""
    steps = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
    return [path for path in steps if not (path / MANIFEST).exists()]


def clear(folder: RemotePath) -> Iterator[str]:
    """Remove leftovers and abort interrupted uploads, including those of exports. Yields a message for
    each."""
    for path in leftovers(folder):
        _remove(path)
        yield f"removed {path.name}, left by a save that was killed"
    if ended := abort_uploads(folder) + abort_uploads(folder / EXPORTS):
        yield f"aborted {ended} uploads, left by a save that was killed"


def _remove(path: RemotePath) -> None:
    path.remove_tree(first=(MANIFEST,))
