"""Costs of a checkpoint beside plain torch.distributed.checkpoint: seconds, bytes and memory of a rank.

    python -m benchmarks.checkpoints [--parameters 1.0 0.5] [--ranks 2] [--repeats 5] [--folder FOLDER]
                                     [--output benchmarks/results/checkpoints.md]

The state of a model of so many billion parameters in fp32 with AdamW, sharded over the ranks, is saved and
loaded by turns, ours and plain, in one world. The first size is for saves that are waited for, the second for
those in the background. FOLDER is on the disk that is measured; its page cache takes part as it does in a
run, and most in the load that is not verified, which follows one of the same files. Peak memory is what
resident memory rose to above what it was before the call.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.machine import describe
from tests.helpers import run_world
from toolkit.checkpoint.async_save import BackgroundWriter
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.metrics.memory import resident_bytes

GIB = 2**30
WIDTH = 2048
"""Tensors are matrices of this width and four times as many rows, as in a Llama of 1B."""

Samples = dict[str, list[tuple[float, float]]]
"""Seconds and peak bytes of each repeat, by what was done."""


def state(billions: float) -> dict[str, Tensor]:
    """Parameters and both moments, sharded by rows over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    count = max(1, round(billions * 1e9 / (4 * WIDTH * WIDTH)))
    tensors: dict[str, Tensor] = {}
    for number in range(count):
        for name in (f"model.{number}", f"optim.{number}.exp_avg", f"optim.{number}.exp_avg_sq"):
            local = torch.randn(4 * WIDTH // dist.get_world_size(), WIDTH)
            tensors[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        tensors[f"optim.{number}.step"] = torch.tensor(1.0)
    return tensors


def timed(do: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until the last rank is done, from an idle disk, and how far this rank's memory rose."""
    if dist.get_rank() == 0:
        os.sync()  # what was written before would be brought to the disk meanwhile
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, _ = resident_bytes()
    start = time.perf_counter()
    do()
    dist.barrier()
    seconds = time.perf_counter() - start
    return seconds, resident_bytes()[1] - before


def waited_for(folder: Path, billions: float, repeats: int) -> Samples:
    tensors, found = state(billions), defaultdict(list)
    manager = CheckpointManager(folder / "ours", say=lambda text: None)
    plain = folder / "plain"

    def save_plain() -> None:
        dcp.save(dict(tensors), checkpoint_id=plain)

    def load_plain() -> None:
        dcp.load(dict(tensors), checkpoint_id=plain)

    for _ in range(repeats):
        for name, do in {
            "save, plain": save_plain,
            "load, plain": load_plain,
            "save, ours": lambda: manager.save(1, tensors, {}),
            "load, ours": lambda: manager.load(1, tensors),
            "load, ours, not verified": lambda: manager.load(1, tensors, verify=False),
        }.items():
            if dist.get_rank() == 0 and name.startswith("save"):
                # Of the page cache, too, each finds the same.
                shutil.rmtree(plain, ignore_errors=True)
                shutil.rmtree(folder / "ours", ignore_errors=True)
            found[name].append(timed(do))
    return found


def in_background(folder: Path, billions: float, repeats: int) -> Samples:
    tensors, found = state(billions), defaultdict(list)
    group = dist.new_group()
    manager = CheckpointManager(
        folder / "ours", background=BackgroundWriter(), group=group, say=lambda text: None
    )
    copies = [torch.empty_like(_local(tensor)) for tensor in tensors.values()]

    def copy() -> None:
        for ours, tensor in zip(copies, tensors.values(), strict=True):
            ours.copy_(_local(tensor))

    copy()
    for repeat in range(repeats + 1):
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "ours", ignore_errors=True)
        measured = {
            "a copy of the state": timed(copy),
            "training waits": timed(lambda: manager.save(1, tensors, {})),
            "until it is written": timed(lambda: manager.end_save(wait=True)),
        }
        for name, sample in measured.items():
            found[f"{name}, first" if repeat == 0 and name == "training waits" else name].append(sample)
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _measure(folder: str, sizes: tuple[float, float], repeats: int) -> list[Samples]:
    warnings.filterwarnings("ignore", category=FutureWarning)
    return [
        dict(waited_for(Path(folder), sizes[0], repeats)),
        dict(in_background(Path(folder), sizes[1], repeats)),
    ]


def report(results: list[list[Samples]], sizes: tuple[float, float], command: str, machine: str) -> str:
    """The tables in Markdown; of each repeat the slowest rank, and the one that rose highest."""
    lines = [
        "# Checkpoints",
        "",
        f"`{command}`: medians of the repeats, {len(results)} ranks. {machine}",
    ]
    for part, (title, billions) in enumerate(
        zip(("Saves that are waited for", "Saves in the background"), sizes, strict=True)
    ):
        gib = 12 * billions * 1e9 / GIB
        lines += [
            "",
            f"## {title}: {billions:g} billion parameters, {gib:.1f} GiB with both moments",
            "",
            "| | seconds | times plain | least | most | GiB a second | peak above the state, GiB of a rank |",
            "|---|---|---|---|---|---|---|",
        ]
        rows = _slowest([rank[part] for rank in results])
        for name, samples in rows.items():
            seconds, peaks = zip(*samples, strict=True)
            middle = statistics.median(seconds)
            lines.append(
                f"| {name} | {middle:.2f} | {_times_plain(rows, name)} | {min(seconds):.2f} "
                f"| {max(seconds):.2f} | {gib / middle:.2f} "
                f"| {statistics.median(peaks) / GIB:.2f} |"
            )
    return "\n".join(lines) + "\n"


def _times_plain(rows: Mapping[str, list[tuple[float, float]]], name: str) -> str:
    """The median over the repeats of how many times as long as plain DCP's save, or load, this took."""
    plain = rows.get(f"{name.partition(',')[0]}, plain")
    if plain is None:
        return ""
    beside = zip(rows[name], plain, strict=True)
    return f"{statistics.median(ours / theirs for (ours, _), (theirs, _) in beside):.2f}"


def _slowest(ranks: list[Samples]) -> Mapping[str, list[tuple[float, float]]]:
    return {
        name: [
            (max(seconds for seconds, _ in repeat), max(peak for _, peak in repeat))
            for repeat in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=float, nargs=2, default=[1.0, 0.5], metavar="BILLIONS")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine, sizes = describe(), tuple(options.parameters)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = run_world(_measure, options.ranks, folder, sizes, options.repeats, timeout=3600)
    command = (
        f"python -m benchmarks.checkpoints --parameters {sizes[0]:g} {sizes[1]:g} "
        f"--ranks {options.ranks} --repeats {options.repeats}"
    )
    text = report(results, sizes, command, machine)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
