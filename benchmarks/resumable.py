"""Many short runs in worlds of ranks, kept as they end: a command that was stopped goes on where it was."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.helpers import run_world

CHUNK = 20
"""Rows that a world runs: each leaves process groups behind, with their threads and sockets."""

Kept = dict[str, Any]
"""A row's result: ``row``, ``seconds`` and what the run returned, or ``failure``."""


class Results:
    """Runs that were made: a line of JSON each in a file of ``folder``, the last one of a row counting.

    ``name`` is unique to a row. Rows that are not ``known``, since a factor was renamed, are left out.
    """

    def __init__(self, folder: Path, name: Callable[[Any], str], known: Callable[[Any], bool]):
        self.folder, self.name, self.known = folder, name, known
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "runs.jsonl"

    def keep(self, row: Any, result: dict[str, Any]) -> None:
        keep(self.folder, row, result)

    def all(self) -> dict[str, Kept]:
        """By the rows' names."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        results = []
        for line in lines:
            try:
                results.append(json.loads(line))
            except json.JSONDecodeError:  # cut off when the command was killed
                continue
        return {self.name(result["row"]): result for result in results if self.known(result["row"])}

    def forget_failures(self) -> None:
        """Have what failed run again."""
        whole = [result for result in self.all().values() if "failure" not in result]
        self.file.write_text("".join(json.dumps(result) + "\n" for result in whole))

    def run_missing(
        self,
        rows: Sequence[Any],
        run: Callable[[str, Any], dict[str, Any]],
        *,
        ranks: int,
        limit_seconds: float,
    ) -> None:
        """``run(folder, row)`` on each rank of worlds of ``ranks``, for each of ``rows`` that has no result.

        One that fails, or takes more than its share of a chunk's limits, is kept as that; the rest go on.
        """
        left = self._missing(rows)
        while left:
            chunk = left[:CHUNK]
            try:
                limit = limit_seconds * len(chunk)
                run_world(_run_all, ranks, str(self.folder), run, chunk, timeout=limit)
            except (RuntimeError, TimeoutError) as error:
                culprit = (self._missing(chunk) or chunk[-1:])[0]
                self.keep(culprit, {"failure": str(error).strip().splitlines()[-1]})
            left = self._missing(rows)
            print(f"{ranks} ranks: {len(left)} left", flush=True)

    def _missing(self, rows: Sequence[Any]) -> list[Any]:
        done = self.all()
        return [row for row in rows if self.name(row) not in done]


def keep(folder: Path, row: Any, result: dict[str, Any]) -> None:
    with (folder / "runs.jsonl").open("a") as lines:
        lines.write(json.dumps({"row": row, **result}) + "\n")


def _run_all(folder: str, run: Callable[[str, Any], dict[str, Any]], rows: Sequence[Any]) -> None:
    """Run each row in this rank's world; rank 0 adds a line to the results as soon as it ends."""
    import torch.distributed as dist

    for row in rows:
        started = time.perf_counter()
        result = run(folder, row)
        if dist.get_rank() == 0:
            keep(Path(folder), row, {"seconds": time.perf_counter() - started, **result})


def command_line(description: str, *, name: str) -> argparse.ArgumentParser:
    """The options that such commands share. A stop of this process reaches the ranks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), name))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    return parser


def part(rows: Sequence[Any], which: str) -> list[Any]:
    """The i-th of n equal parts, of ``which`` "i/n"."""
    index, _, count = which.partition("/")
    return list(rows[int(index) - 1 :: int(count)])


def publish(text: str, output: Path | None) -> None:
    """Print a report, and write it where it was asked for."""
    print(text)
    if output:
        output.write_text(text)
