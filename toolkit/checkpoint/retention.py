"""Which checkpoints of a folder may go, how they go, and what killed processes left. Imports no torch."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.checkpoint.manifest import step_folder

_TEMPORARY = re.compile(r"step-\d+\.tmp-[0-9a-f]+")
_REPLACED = re.compile(r"(step-\d+)\.replaced-[0-9a-f]+")


def temporary_name(final: Path) -> Path:
    """A new name beside ``final``, by which nobody takes it for a checkpoint."""
    return final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")


def superseded(
    steps: Sequence[int],
    *,
    newest: int,
    keep_latest_k: int,
    keep_every_n: int | None = None,
    best: int | None = None,
) -> list[int]:
    """Which of the ascending ``steps`` need not be kept: not ``newest``, which was saved last, not the
    ``keep_latest_k`` − 1 highest others (0: all), not ``best``, and none that ``keep_every_n`` divides."""
    others = [step for step in steps if step != newest]
    if keep_latest_k == 0:
        return []
    older = others[: max(0, len(others) + 1 - keep_latest_k)]
    return [step for step in older if step != best and not (keep_every_n and step % keep_every_n == 0)]


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
