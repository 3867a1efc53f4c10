"""Write ``metrics.jsonl``: one JSON object per line and step, in order. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

FINGERPRINTS = "fingerprints.jsonl"
"""File of :mod:`toolkit.metrics.fingerprint` in the folder of a run."""


class JsonLines:
    """Appends records to ``path``; each is on disk when :meth:`write` returns.

    A run that resumes after ``resume_step`` continues the file and drops lines of later steps, because it
    will write them again. A run that starts at 0 creates a new file and renames an old one to
    ``<stem>.previous.jsonl``. A run that writes no record leaves the file unchanged.
    """

    def __init__(self, path: Path, *, resume_step: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._resume_step = path, resume_step
        self._file: TextIO | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record``; NaN and infinity, which JSON lacks, become null."""
        self._file = self._file or self._open()
        self._file.write(json.dumps({key: _json_value(value) for key, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        if self._path.exists():
            if self._resume_step == 0:
                set_aside(self._path)
            else:
                _drop_after(self._path, self._resume_step)
        return self._path.open("a", encoding="utf-8")


def set_aside(path: Path) -> None:
    """Rename ``path``, the file of an earlier run, to ``<stem>.previous.jsonl``."""
    path.replace(path.with_name(f"{path.stem}.previous{path.suffix}"))


def rank_files(folder: Path) -> dict[int, Path]:
    """Return the files of ranks other than 0 in ``folder`` by rank, without those of a previous run."""
    matches = {
        path: re.fullmatch(r"metrics\.rank-(\d+)\.jsonl", path.name)
        for path in folder.glob("metrics.rank-*.jsonl")
    }
    return {int(match[1]): path for path, match in matches.items() if match}


def first_loss(path: Path) -> float | None:
    """Return the first training loss in a file of records; None if the file is unreadable or has none."""
    with suppress(OSError, ValueError), path.open(encoding="utf-8") as file:
        return next((loss for line in file if (loss := json.loads(line).get("loss")) is not None), None)
    return None


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_after(path: Path, last: int) -> None:
    """Keep only the complete lines up to step ``last``, replacing the file atomically."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step(line) <= last]
    if len(kept) < len(lines):
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)


def _step(line: str) -> float:
    """Return the step of a line; infinity if the line is damaged."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
