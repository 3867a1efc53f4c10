"""Costs of converting a model: seconds, and the most memory that the program took.

    python -m benchmarks.convert FOLDER [--folder WORK] [--ways hf-to-dcp dcp-to-hf ...]
                                        [--output benchmarks/results/convert.md]

FOLDER is a Hugging Face folder; ``tools/make_random_model.py`` makes one of any size. Every way of
``llama-toolkit convert`` is run as a program of its own, without and with ``--verify``, in WORK (default:
a temporary folder), which needs three times the room of FOLDER. Memory is ``ru_maxrss`` of the program: what
was resident at most, mapped files included. What the last way back gives is compared with FOLDER, each byte
of each tensor. Seconds include starting Python and bringing the files onto the disk; the page cache is as
the way before left it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import describe
from toolkit.weights.convert import compare
from toolkit.weights.open import open_weights

GIB = 2**30
WAYS = ("hf-to-dcp", "dcp-to-hf", "hf-to-meta", "meta-to-hf", "meta-to-dcp", "dcp-to-meta")


@dataclass(frozen=True)
class Sample:
    """One run of the program."""

    way: str
    seconds: float
    peak: int
    written: int


def run(way: str, source: Path, out: Path, *, verify: bool) -> Sample:
    """Convert by a process of its own."""
    words = [sys.executable, "-m", "toolkit", "convert", way, str(source), str(out)]
    start = time.perf_counter()
    process = subprocess.Popen(words + ["--verify"] * verify, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"{' '.join(words)} has failed")
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return Sample(f"{way}{', verified' if verify else ''}", seconds, usage.ru_maxrss * 1024, written)


def measure(folder: Path, work: Path, ways: list[str]) -> list[Sample]:
    """Each way twice; what one way has made, another starts from."""
    made, samples = {"hf": folder}, []
    for verify in (False, True):
        for way in ways:
            given, _, to = way.partition("-to-")
            if given not in made:
                made[given] = work / given
                run(f"hf-to-{given}", folder, made[given], verify=False)
            out = work / "out"
            samples.append(run(way, made[given], out, verify=verify))
            if to == "hf":
                compare(open_weights(folder), open_weights(out))
            if to not in made:
                made[to] = out.rename(work / to)
            else:
                shutil.rmtree(out)
    return samples


def report(samples: list[Sample], command: str, machine: str) -> str:
    """The table in Markdown."""
    lines = [
        "# Conversion",
        "",
        f"`{command}`. {machine}",
        "",
        "| | GiB written | seconds | GiB a second | peak memory, GiB |",
        "|---|---|---|---|---|",
    ]
    for it in samples:
        gib = it.written / GIB
        lines.append(
            f"| {it.way} | {gib:.2f} | {it.seconds:.1f} | {gib / it.seconds:.2f} | {it.peak / GIB:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, metavar="FOLDER")
    parser.add_argument("--folder", type=Path, metavar="WORK", help="default: a temporary one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        samples = measure(options.model, Path(work), options.ways)
    text = report(samples, f"python -m benchmarks.convert {options.model.name}", describe())
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
