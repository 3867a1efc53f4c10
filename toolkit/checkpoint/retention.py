"""Retention of checkpoints, and the storage functions of a checkpoint folder. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def step_storage(folder: Path) -> Any:
    """Return the module that commits and deletes checkpoints in ``folder``, local or remote."""
    if isinstance(folder, Path):
        from toolkit.checkpoint import local_steps

        return local_steps
    from toolkit.checkpoint import remote_steps

    return remote_steps


def steps_to_delete(
    steps: Sequence[int],
    *,
    newest: int,
    keep_latest_k: int,
    keep_every_n: int | None = None,
    also_kept: Collection[int | None] = (),
) -> list[int]:
    """Return the steps to delete, out of the ascending ``steps``.

    The kept steps are ``newest``, which was saved last; the ``keep_latest_k`` − 1 highest others (0: all);
    ``also_kept``; and multiples of ``keep_every_n``.
    """
    others = [step for step in steps if step != newest]
    if keep_latest_k == 0:
        return []
    older = others[: max(0, len(others) + 1 - keep_latest_k)]
    return [
        step for step in older if step not in also_kept and not (keep_every_n and step % keep_every_n == 0)
    ]
