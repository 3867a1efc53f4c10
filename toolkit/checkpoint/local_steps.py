"""Commit and delete checkpoints in a local folder, each by one rename.

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
from toolkit.io.work_folder import replace_folder

_TEMPORARY = re.compile(r"step-\d+\.tmp-[0-9a-f]+")
_REPLACED = re.compile(r"(step-\d+)\.replaced-[0-9a-f]+")


def temporary_name(final: Path) -> Path:
    """Return a new path next to ``final`` that does not look like a checkpoint."""
    return final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")


def begin(final: Path) -> Path:
    """Create and return the temporary folder for the files of ``final``."""
    temporary = temporary_name(final)
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, final: Path, manifest: Mapping[str, Any]) -> None:
    """Rename the temporary folder to the checkpoint ``final``, replacing any earlier one."""
    with (temporary / MANIFEST).open("w") as file:
        json.dump(manifest, file, indent=1)
        sync_file(file)
    sync_folder(temporary)
    replace_folder(temporary, final)


def discard(temporary: Path) -> None:
    """Remove the files of a failed save."""
    shutil.rmtree(temporary, ignore_errors=True)


def delete(folder: Path, step: int) -> None:
    """Delete the checkpoint of ``step``. The folder is renamed first, so that a half-deleted one never looks
    committed."""
    path = step_folder(folder, step)
    shutil.rmtree(path.rename(temporary_name(path)))


def leftovers(folder: Path) -> list[Path]:
    """Return the folders of interrupted saves and deletions."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if _TEMPORARY.fullmatch(path.name) or _REPLACED.fullmatch(path.name))


def clear(folder: Path) -> Iterator[str]:
    """Remove leftovers; restore a checkpoint whose replacement was not committed. Yields a message for each.

    Also works in a folder of exports, whose names are similar.
    """
    for path in leftovers(folder):
        replaced = _REPLACED.fullmatch(path.name)
        if replaced and not (folder / replaced[1]).exists():
            path.rename(folder / replaced[1])
            yield f"restored {replaced[1]}, which a killed save was replacing"
        else:
            shutil.rmtree(path)
            yield f"removed {path.name}, left by a save that was killed"
    for lock in folder.glob("step-*.lock"):  # of an export whose run was killed
        lock.unlink()
