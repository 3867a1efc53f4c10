"""Writes and deletes checkpoints in a folder of this machine: one rename makes a step there, and unmakes it.

:mod:`toolkit.checkpoint.remote_steps` has the same functions for object storage. Imports no torch.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import MANIFEST, step_folder
from toolkit.io.atomic import sync_file, sync_folder
from toolkit.io.work_folder import take_place

_TEMPORARY = re.compile(r"step-\d+\.tmp-[0-9a-f]+")
_REPLACED = re.compile(r"(step-\d+)\.replaced-[0-9a-f]+")


def temporary_name(final: Path) -> Path:
    """A new name beside ``final``, by which nobody takes it for a checkpoint."""
    return final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")


def begin(final: Path) -> Path:
    """Make the folder in which the files of ``final`` are written, and return it."""
    temporary = temporary_name(final)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Turn the written folder into the checkpoint ``final``, in the place of one of before."""
    with (temporary / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        sync_file(file)
    sync_folder(temporary)
    take_place(temporary, final)


def discard(temporary: Path) -> None:
    """Remove what a failed save has written."""
    shutil.rmtree(temporary, ignore_errors=True)


def delete(folder: Path, step: int) -> None:
    """Delete the checkpoint of ``step``, renamed first: half deleted, it must not look committed."""
    path = step_folder(folder, step)
    shutil.rmtree(path.rename(temporary_name(path)))


def leftovers(folder: Path) -> list[Path]:
    """Folders of saves and deletions that did not come to their end."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if _TEMPORARY.fullmatch(path.name) or _REPLACED.fullmatch(path.name))


def clear(folder: Path) -> Iterator[str]:
    """Remove the leftovers, or put back a checkpoint whose successor was never committed; tell of each.

    Exports are named alike, and ``folder`` may be theirs.
    """
    for path in leftovers(folder):
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (folder / replaced[1]).exists():
            path.rename(folder / replaced[1])
            yield f"restored {replaced[1]}, which a killed save was replacing"
        else:
            shutil.rmtree(path)
            yield f"removed {path.name}, left by a save that was killed"
    for lock in folder.glob("step-*.lock"):  # of an export that was killed with its run
        lock.unlink()
