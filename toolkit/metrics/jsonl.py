"""``metrics.jsonl``: one JSON object a line, in the order of the steps, each step once. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class JsonLines:
    """Appends records to ``path``, each on disk when :meth:`write` returns.

    A run that resumes after ``resume_step`` continues the file: lines beyond that step, written by a
    run that was killed after its last checkpoint, are dropped, for they are about to be written
    again. A run that starts at 0 begins a new file; one that was there becomes ``<stem>.previous.jsonl``.
    A run that writes no record leaves the file as it is.
    """

    def __init__(self, path: Path, *, resume_step: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._resume_step = path, resume_step
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``; a NaN or infinity, which JSON does not have, becomes null."""
        self._file = self._file or self._open()
        self._file.write(json.dumps({key: _plain(value) for key, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        if self._path.exists():
            if self._resume_step == 0:
                set_aside(self._path)
            else:
                _cut(self._path, self._resume_step)
        return self._path.open("a", encoding="utf-8")


def set_aside(path: Path) -> None:
    """Keep ``path``, of an earlier run, as ``<stem>.previous.jsonl``."""
    path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))


def rank_files(folder: Path) -> dict[int, Path]:
    """The files of ranks other than 0 in ``folder``, without those that were set aside."""
    found = {}
    for path in folder.glob("metrics.rank-*.jsonl"):
        if name := re.fullmatch(r"metrics\.rank-(\d+)\.jsonl", path.name):
            found[int(name[1])] = path
    return found


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut(path: Path, last: int) -> None:
    """Keep the lines up to step ``last``, and only whole ones, replacing the file at once."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step(line) <= last]
    if len(kept) < len(lines):
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)


def _step(line: str) -> float:
    """The step of a line; a damaged one is beyond any step."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
