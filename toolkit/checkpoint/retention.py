"""Which checkpoints of a folder may go, and who deletes and writes them there. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any


def steps_in(folder: Path) -> Any:
    """The module whose functions write and delete the checkpoints of a ``folder``, or a step there."""
    if isinstance(folder, Path):
        from toolkit.checkpoint import local_steps

        return local_steps
    from toolkit.checkpoint import remote_steps

    return remote_steps


def superseded(
    steps: Sequence[int],
    *,
    newest: int,
    keep_latest_k: int,
    keep_every_n: int | None = None,
    also_kept: Collection[int | None] = (),
) -> list[int]:
    """Which of the ascending ``steps`` need not be kept: not ``newest``, which was saved last, not the
    ``keep_latest_k`` − 1 highest others (0: all), none of ``also_kept``, and none that
    ``keep_every_n`` divides."""
    others = [step for step in steps if step != newest]
    if keep_latest_k == 0:
        return []
    older = others[: max(0, len(others) + 1 - keep_latest_k)]
    return [
        step for step in older if step not in also_kept and not (keep_every_n and step % keep_every_n == 0)
    ]
