"""Folders that are created atomically by one rename, and can be resumed after a kill. Imports no torch.

Until the rename, a folder has a temporary name next to the final one. The name contains a hash of the plan,
so that a process with the same plan finds finished files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from pathlib import Path

from toolkit.errors import DataError
from toolkit.io.atomic import sync_folder


def work_folder(final: Path, plan: object) -> Path:
    """Return the temporary path of ``final`` for a ``plan``, JSON types that determine the folder's
    contents."""
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    return final.with_name(f"{final.name}.tmp-{digest[:8]}")


def file_state(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files in a source folder, for a plan. Lock files are excluded,
    because a killed process leaves them behind."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    files = [(path.name, path.stat()) for path in paths if path.is_file() and path.suffix != ".lock"]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]


def reject_existing(out: Path) -> None:
    """Raise DataError if ``out`` exists and is not an empty folder."""
    if out.is_symlink():  # a folder cannot be renamed to it
        raise DataError(f"{out} is a link: use the folder {out.resolve()} itself, or delete the link")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists: choose another folder, or delete it")


def write_in_progress(out: Path, holder: BlockingIOError) -> DataError:
    """Return the error for a lock on ``out`` that another process holds."""
    return DataError(f"{holder} is writing {out}\n  fix:  wait until it ends, or use another folder")


def replace_folder(work: Path, final: Path) -> None:
    """Rename a complete and synced folder to ``final``, replacing an existing folder.

    The existing folder is first renamed; :func:`toolkit.checkpoint.local_steps.clear` restores it after a
    kill.
    """
    replaced = None
    if final.exists():
        replaced = final.with_name(f"{final.name}.replaced-{uuid.uuid4().hex[:8]}")
        _rename(final, replaced)
    _rename(work, final)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)  # the next start tries again


def _rename(old: Path, new: Path) -> None:
    """Rename within a folder, durably."""
    old.rename(new)
    sync_folder(new.parent)
