"""Costs of loading a Hugging Face folder into a sharded model: memory of each rank, and seconds.

    python -m benchmarks.weights_load FOLDER [--ranks 2] [--repeats 3] [--broadcast]
                                      [--output benchmarks/results/weights_load.md]

FOLDER is a model; ``tools/make_random_model.py`` makes one of any size. The ranks build the model in the
dtype of the files, sharded by FSDP, and load it. By turns with them one process opens the same files with
``safetensors.torch.load_file``, which maps them and reads nothing, and copies every tensor, which reads it.
The copies are kept, as a model is: most of the time of either is the kernel's, for memory that is new to the
process, and copies dropped file by file go into memory that it has already. Seconds are from before the
headers are read until the last rank is done. "Cold" starts with the files out of the page cache
(``posix_fadvise``), "warm" with as much of them there as the runs before have left.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from benchmarks.machine import describe
from tests.helpers import run_world
from toolkit.build import build_model
from toolkit.config import Config
from toolkit.distributed.dtensor import shard_and_offset
from toolkit.hardware import cores
from toolkit.metrics.memory import resident_bytes
from toolkit.parallel.mesh import build_mesh
from toolkit.weights.load import load_weights, open_on_all_ranks
from toolkit.weights.safetensors import SafetensorsFolder

MB = 1e6
STATES = ("cold", "warm")


@dataclass(frozen=True)
class Sample:
    """Bytes are of the process, mapped files included, and of the device where there is one. ``begin`` is
    before the model is made, ``end`` after it is loaded, ``peak`` in between."""

    seconds: float
    begin: int = 0
    end: int = 0
    peak: int = 0
    shard: int = 0
    device_begin: int = 0
    device_end: int = 0
    device_peak: int = 0


def ours(folder: str, broadcast: bool) -> Sample:
    """Model and weights on this rank."""
    torch.set_num_threads(max(1, cores() // dist.get_world_size()))
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else torch.device("cpu")
    stored = SafetensorsFolder(Path(folder))
    dtype = str(next(iter(stored.tensors.values())).dtype).removeprefix("torch.")
    config = Config.model_validate({"training": {"dtype": dtype, "mixed_precision_param": dtype}})
    mesh = build_mesh(device, dp_shard=dist.get_world_size())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    begin, device_begin = resident_bytes()[0], _on_device(device)[0]
    model_parts = build_model(
        config, stored.args, mesh, device, param_dtype=getattr(torch, dtype), seed=0, pretrained=True
    )
    dist.barrier()
    start = time.perf_counter()
    source = open_on_all_ranks(lambda: SafetensorsFolder(Path(folder)), only_rank_0=broadcast)
    tensors = dict(model_parts.named_parameters())
    load_weights(source, dict(tensors), broadcast_from_rank_0=broadcast)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    seconds = time.perf_counter() - start
    shard = sum(shard_and_offset(tensor)[0].nbytes for tensor in tensors.values())
    return Sample(seconds, begin, *resident_bytes(), shard, device_begin, *_on_device(device))


def _on_device(device: torch.device) -> tuple[int, int]:
    """(now, peak) bytes of tensors."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


def plain(folder: str) -> Sample:
    """The same files in one process, mapped and copied; mapped pages count until they are taken away."""
    torch.set_num_threads(cores())
    Path("/proc/self/clear_refs").write_text("5")
    begin, _ = resident_bytes()
    start = time.perf_counter()
    copies = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        copies += [tensor.clone() for tensor in load_file(file).values()]
    return Sample(time.perf_counter() - start, begin, *resident_bytes())


def _forget(folder: str) -> None:
    """Take the files out of the page cache."""
    for file in Path(folder).glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure(folder: str, ranks: int, repeats: int, broadcast: bool) -> tuple[dict, dict]:
    """By state of the page cache, for each repeat: our ranks, and the plain process."""
    mine: dict[str, list[list[Sample]]] = {state: [] for state in STATES}
    theirs: dict[str, list[Sample]] = {state: [] for state in STATES}
    for state in STATES:
        for _ in range(repeats):
            if state == "cold":
                _forget(folder)
            mine[state].append(run_world(ours, ranks, folder, broadcast, timeout=3600))
            if state == "cold":
                _forget(folder)
            theirs[state] += run_world(plain, 1, folder, timeout=3600)
    return mine, theirs


def report(mine: dict, theirs: dict, size: int, command: str, machine: str) -> str:
    lines = ["# Loading weights", "", f"`{command}`. {size / 1e9:.2f} GB of tensors. {machine}", ""]
    lines += ["## Memory, MB", "", *_memory_table(mine["cold"][0])]
    lines += ["", "## Seconds: medians, least … most", ""]
    lines += ["| page cache | ours | load_file and copies | ratio |", "|---|---|---|---|"]
    for state in STATES:
        ours_s = [max(rank.seconds for rank in repeat) for repeat in mine[state]]
        plain_s = [sample.seconds for sample in theirs[state]]
        ratio = statistics.median(ours_s) / statistics.median(plain_s)
        lines.append(f"| {state} | {_spread(ours_s)} | {_spread(plain_s)} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def _memory_table(ranks: list[Sample]) -> list[str]:
    """The lines that others print when they load, for each rank."""
    rows = {
        "own shard": [rank.shard for rank in ranks],
        "before": [rank.begin for rank in ranks],
        "end − begin": [rank.end - rank.begin for rank in ranks],
        "peak − begin": [rank.peak - rank.begin for rank in ranks],
        "total peak": [rank.peak for rank in ranks],
    }
    if any(rank.device_end for rank in ranks):
        rows |= {
            "device: before": [rank.device_begin for rank in ranks],
            "device: end − begin": [rank.device_end - rank.device_begin for rank in ranks],
            "device: peak − begin": [rank.device_peak - rank.device_begin for rank in ranks],
            "device: total peak": [rank.device_peak for rank in ranks],
        }
    head = " | ".join(f"rank {rank}" for rank in range(len(ranks)))
    lines = [f"| | {head} |", "|---" * (len(ranks) + 1) + "|"]
    return lines + [
        f"| {name} | {' | '.join(f'{value / MB:,.0f}' for value in row)} |" for name, row in rows.items()
    ]


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} … {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--broadcast", action="store_true", help="rank 0 alone reads")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine = describe()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = str(options.folder.resolve())
    mine, theirs = measure(folder, options.ranks, options.repeats, options.broadcast)
    command = f"python -m benchmarks.weights_load {options.folder.name} --ranks {options.ranks}"
    command += f" --repeats {options.repeats}" + " --broadcast" * options.broadcast
    size = sum(rank.shard for rank in mine["cold"][0])
    text = report(mine, theirs, size, command, machine)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
