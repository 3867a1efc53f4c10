"""A folder that appears whole, by one rename, and that the successor of a killed process goes on with.

Until then it has a name beside the final one that tells what is being made: whoever makes the same thing
again finds it there, with the files that are finished. Imports no torch.
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
    """Where ``final`` is made by ``plan``: JSON types that tell all that decides its bytes."""
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    return final.with_name(f"{final.name}.tmp-{digest[:8]}")


def state_of(folder: Path) -> list[tuple[str, int, int]]:
    """A plan's record of the files in a folder that is read: a change of any is another plan, save of a lock,
    which a killed process leaves there. No folder has none."""
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [(path.name, path.stat()) for path in paths if path.is_file() and path.suffix != ".lock"]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def refuse_existing(out: Path) -> None:
    """Raise DataError if ``out`` is anything but an empty folder or a name that is free."""
    if out.is_symlink():  # no folder can be renamed to it
        raise DataError(f"{out} is a link: name the folder {out.resolve()} itself, or delete the link")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already: name another folder, or delete it")


def in_progress(out: Path, holder: BlockingIOError) -> DataError:
    """The error for a lock which says that somebody else writes ``out``."""
    return DataError(f"{holder} is writing {out}\n  fix:  wait until it has ended, or name another folder")


def take_place(work: Path, final: Path) -> None:
    """Give a folder that is whole and on the disk its final name; what had it before goes.

    That is put aside first, and :func:`toolkit.checkpoint.local_steps.clear` puts it back after a kill.
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
