"""How much faster the second start of a compiled run is, to the end of its first step.

    python -m benchmarks.compile_cache --output benchmarks/results/compile_cache.md
        [--ranks 2] [--repeats 3] [--table.key value …]

Each repeat starts ``run_train.sh`` twice with ``compile.enable`` and one ``compile.cache_folder``: empty,
then as the first start left it. For comparison the same without compile. One run before the first timing
fills the token cache. Other arguments go to the run.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.startup import main_of, time_first_step


def time_start(ranks: int, folder: Path, arguments: Sequence[str]) -> tuple[float, float]:
    """Seconds to the end of the first step, and of them on compiling."""
    folder.mkdir()
    seconds, _ = time_first_step(ranks, folder, arguments)
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    return seconds, float(first.get("compile_seconds", 0.0))


def measure(ranks: int, repeats: int, arguments: Sequence[str]) -> dict[str, list[tuple[float, float]]]:
    """(seconds, of them compiling) of each kind of start."""
    # The user's own choice of a folder would be filled from the start.
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    timed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        time_start(ranks, Path(temporary, "warm-up"), arguments)
        for repeat in range(repeats):
            folder = Path(temporary, str(repeat))
            folder.mkdir()
            compiled = [*arguments, "--compile.enable", "--compile.cache_folder", str(folder / "cache")]
            for name, flags in {"eager": arguments, "first": compiled, "second": compiled}.items():
                timed[name].append(time_start(ranks, folder / name, flags))
                print(f"{name}: {timed[name][-1][0]:.1f} s, compile {timed[name][-1][1]:.1f} s", flush=True)
    return timed


def report(ranks: int, timed: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """The table in Markdown; the ratio is taken repeat by repeat."""

    def row(name: str, starts: Sequence[tuple[float, float]]) -> str:
        seconds, compiling = zip(*starts, strict=True)
        cells = (statistics.median(seconds), min(seconds), max(seconds), statistics.median(compiling))
        return f"| {name} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |"

    pairs = zip(timed["first"], timed["second"], strict=True)
    ratios = [first / second for (first, _), (second, _) in pairs]
    rows = [
        "# The compile cache",
        "",
        f"`python -m benchmarks.compile_cache --ranks {ranks} --repeats {len(ratios)}`: seconds from the "
        "start of run_train.sh to the end of the first step of the debug model, on "
        f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), torch {torch.__version__}, token "
        "cache warm. The last column is the median of what rank 0 spent on compiling, or on reading what was "
        "compiled.",
        "",
        "| | median | least | most | compiling |",
        "|---|---|---|---|---|",
        row("eager", timed["eager"]),
        row("compiled, empty cache", timed["first"]),
        row("compiled, second start", timed["second"]),
        "",
        f"The second start is {statistics.median(ratios):.1f} times faster "
        f"(least {min(ratios):.1f}, most {max(ratios):.1f}).",
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main_of(__doc__, measure, report, repeats=3)
