"""The part of a file of JSON lines that a run which goes on keeps. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path


def cut(path: Path, last: int) -> None:
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
