"""Check the machines of a run: versions, devices, links of the mesh, storage and clocks, in one table.

    NGPU=8 NNODES=2 NODE_RANK=I MASTER_ADDR=HOST llama-toolkit check-cluster CONFIG [--table.key value …]
    torchrun --nproc_per_node=8 --nnodes=2 … -m toolkit check-cluster CONFIG [--table.key value …]

Run the same command on each machine, as for run_train.sh, or under torchrun. Ranks form a process group as in
a run, on NCCL or gloo, and build the mesh of CONFIG; nothing is trained. Mismatched launchers are rejected by
name, as in a run; under torchrun the verdict reports them. All groups of a mesh dimension all-reduce at the
same time, as in a step; the rate is NCCL's bus bandwidth, 2 (n - 1) / n bytes per second, of the slowest
group. Each machine writes a file into job.dump_folder, syncs it and reads it again, possibly from the page
cache. The last line is the verdict; exit code 1 means that machines differ or do not meet the requirements of
a run.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.commands.arguments import command_parser, count
from toolkit.config import Config, load_config
from toolkit.errors import EXIT_ERROR, EXIT_FINISHED, ConfigError, Problem
from toolkit.hardware import detect

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ROUNDS = 5
GPU_MIB, CPU_MIB = 256, 16
"""Size of an all-reduce in MiB, large enough for the full rate."""
SLOW = 2.0
"""Ratio of the median to a machine's rate from which the verdict reports the machine."""


@dataclass(frozen=True)
class Node:
    """Facts of one machine, collected by its first rank."""

    host: str
    ranks: list[int]
    device: str
    versions: dict[str, str]
    clock: float  # seconds ahead of the first machine's
    write: float  # bytes a second, 0 where it failed
    read: float
    trouble: str  # of the storage


@dataclass(frozen=True)
class Link:
    """All-reduce over one dimension: bytes per second of its slowest group, and the ranks of that group."""

    dimension: str
    size: int
    rate: float
    slowest: list[int]
    median: float


def versions(device: Any) -> dict[str, str]:
    """Versions that must be equal on all machines, by name."""
    import torch

    from toolkit.launcher import nodes

    found = {name: str(value) for name, value in nodes.versions().items()}
    found["torch"] = torch.__version__
    if device.type == "cuda":
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def describe(device: Any) -> str:
    import torch

    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB"
    return f"CPU, {os.cpu_count()} cores"


def storage(folder: Path, size: int) -> tuple[float, float, str]:
    """Measure the rates in bytes per second at which ``folder`` is written (with sync) and read; also return
    an error message."""
    path = folder / f".check-{uuid.uuid4().hex[:8]}"
    block = os.urandom(1 << 20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            started = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                for _ in range(size >> 20):
                    file.write(block)
                os.fsync(file.fileno())
            written = time.perf_counter() - started
            started = time.perf_counter()
            with path.open("rb", buffering=0) as file:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while file.read(1 << 20):
                    pass
            return size / written, size / (time.perf_counter() - started), ""
        finally:
            with suppress(OSError):
                path.unlink()
    except OSError as error:
        return 0.0, 0.0, str(error)


def links(mesh: Any, sizes: Mapping[str, int], device: Any) -> list[Link]:
    """Time all-reduces over each mesh dimension with several ranks, and over the world."""
    import torch
    import torch.distributed as dist

    size = (GPU_MIB if device.type == "cuda" else CPU_MIB) << 20
    tensor = torch.ones(size // 4, device=device)
    groups = {name: group for name, group in _groups(mesh, sizes).items() if dist.get_world_size(group) > 1}
    found = []
    for name, group in groups.items():
        dist.all_reduce(tensor, group=group)  # makes the connections
        _wait(device)
        dist.all_reduce(torch.zeros(1, device=device))
        _wait(device)
        started = time.perf_counter()
        for _ in range(ROUNDS):
            dist.all_reduce(tensor, group=group)
        _wait(device)
        seconds = (time.perf_counter() - started) / ROUNDS
        ranks = dist.get_world_size(group)
        rate = 2 * (ranks - 1) / ranks * size / seconds
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, (rate, dist.get_process_group_ranks(group)))
        of_all.sort(key=lambda one: one[0])
        (slowest, members), (median, _) = of_all[0], of_all[len(of_all) // 2]
        found.append(Link(name, ranks, slowest, members, median))
        tensor.fill_(1)
    return found


def _groups(mesh: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    import torch.distributed as dist

    whole = {"world": dist.group.WORLD} if sum(size > 1 for size in sizes.values()) != 1 else {}
    fsdp = mesh.fsdp if mesh.fsdp.ndim == 1 else mesh.fsdp[mesh.fsdp.mesh_dim_names[1]]
    found = {
        "pp": mesh.pp,
        "dp_replicate": mesh.fsdp[mesh.fsdp.mesh_dim_names[0]] if mesh.fsdp.ndim == 2 else None,
        "dp_shard × cp" if sizes["cp"] > 1 else "dp_shard": fsdp,
        "cp": mesh.cp,
        "tp": mesh.tp,
    }
    return {name: part.get_group() for name, part in found.items() if part is not None} | whole


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(nodes: Sequence[Node], found: Sequence[Link]) -> str:
    """Format the table of machines, then that of mesh dimensions."""
    machines = [("machine", "ranks", "device", "clock", "write", "read")]
    for node in nodes:
        write, read = (f"{rate / 1e6:,.0f} MB/s" if rate else "fails" for rate in (node.write, node.read))
        span = f"{node.ranks[0]}-{node.ranks[-1]}" if len(node.ranks) > 1 else str(node.ranks[0])
        machines.append((node.host, span, node.device, f"{node.clock:+.3f} s", write, read))
    reductions = [("all-reduce", "ranks", "slowest group", "median", "ranks of the slowest")]
    for link in found:
        named = ", ".join(map(str, link.slowest[:8])) + (", …" if len(link.slowest) > 8 else "")
        slowest, median = (f"{rate / 1e9:.2f} GB/s" for rate in (link.rate, link.median))
        reductions.append((link.dimension, str(link.size), slowest, median, named))
    shared = "\n".join(f"{name} {value}" for name, value in nodes[0].versions.items())
    parts = [shared, _columns(machines)] + ([_columns(reductions)] if found else [])
    return "\n\n".join(parts)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def problems(nodes: Sequence[Node], found: Sequence[Link]) -> list[str]:
    """Describe problems, with their machines, that would break or slow down a run."""
    from toolkit.distributed.clocks import skew_warnings

    first = nodes[0]
    told = []
    for node in nodes[1:]:
        differing = [
            f"{name} {node.versions.get(name)} (there {value})"
            for name, value in first.versions.items()
            if node.versions.get(name) != value
        ]
        if differing:
            told.append(f"{node.host} is unlike {first.host}: {', '.join(differing)}")
        if node.device != first.device:
            told.append(f"{node.host} has {node.device}, and {first.host} has {first.device}")
        if len(node.ranks) != len(first.ranks):
            told.append(f"{node.host} has {len(node.ranks)} ranks, and {first.host} has {len(first.ranks)}")
    told += skew_warnings({node.host: node.clock for node in nodes}, first.host)
    told += [f"the storage of {node.host} fails: {node.trouble}" for node in nodes if node.trouble]
    writes = sorted(node.write for node in nodes if node.write)
    for node in nodes:
        if node.write and node.write * SLOW < writes[len(writes) // 2]:
            median = writes[len(writes) // 2] / 1e6
            told.append(
                f"the storage of {node.host} takes {node.write / 1e6:,.0f} MB/s, in the median {median:,.0f}"
            )
    for link in found:
        if link.rate * SLOW < link.median:
            named = ", ".join(map(str, link.slowest))
            times = f"{link.median / link.rate:.1f} times as slow as the median"
            told.append(f"the {link.dimension} group of ranks {named} is {times}")
    return told


def check(config: Config, mib: int) -> int:
    """Run the checks on this rank; rank 0 prints. Returns the same exit code on all ranks."""
    import torch.distributed as dist

    from toolkit.config.local_paths import expand_user
    from toolkit.distributed import process_group
    from toolkit.distributed.clocks import clock_offsets, hosts
    from toolkit.parallel.dims import degrees
    from toolkit.parallel.mesh import build_mesh

    device = process_group.local_device("cpu" if config.training.device == "cpu" else "")
    process_group.start(device, timeout_seconds=config.comm.init_timeout_seconds)
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = degrees(config.parallelism, world)
    if layout is None:
        rule = f"the degrees of parallelism do not multiply to the {world} ranks"
        raise ConfigError(Problem(rule, "start as many ranks as the run will have"))
    sizes = {name: getattr(layout, name) for name in DIMENSIONS}
    mesh = build_mesh(device, **sizes)
    names, offsets = hosts(), clock_offsets()
    alike = {name: [it for it, host in enumerate(names) if host == name] for name in dict.fromkeys(names)}
    mine = alike[names[rank]]
    rates = (0.0, 0.0, "")
    if rank == mine[0]:
        rates = storage(expand_user(config.job.dump_folder), mib << 20)
    found = links(mesh, sizes, device)
    own = Node(names[rank], mine, describe(device), versions(device), offsets[rank], *rates)
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, own)
    nodes = [everywhere[ranks[0]] for ranks in alike.values()]
    told = problems(nodes, found)
    if rank == 0:
        print(table(nodes, found), "", *told, sep="\n")
        machines = f"{len(nodes)} machines" if len(nodes) > 1 else "1 machine"
        print(f"verdict: {len(told)} problems" if told else f"verdict: {machines}, {world} ranks: all well")
    process_group.stop()
    return EXIT_ERROR if told else EXIT_FINISHED


def launch(config: Config, command: Sequence[str], keys: Sequence[str]) -> int:
    """Start ``command`` once per rank of this machine, as a launch does."""
    from toolkit.launch import launch_from
    from toolkit.launcher.node_terms import terms_from
    from toolkit.launcher.nodes import supervise_nodes
    from toolkit.launcher.supervise import supervise

    hardware = detect(config.training.device)
    asked = launch_from(os.environ, hardware)
    if asked.nodes == 1:
        return supervise(command, asked)
    facts = {"device": hardware.device, "options": list(keys)}
    return supervise_nodes(
        command,
        asked,
        terms_from(os.environ, asked),
        facts,
        lambda: None,
        None,
        lambda nodes: [] if nodes == asked.nodes else None,
        lambda: 0,
        lambda nodes, known: "",
    )


def main(argv: Sequence[str]) -> int:
    parser = command_parser("check-cluster", __doc__)
    parser.add_argument("config", metavar="CONFIG", help="TOML of the run; other words are keys of it")
    parser.add_argument("--mib", type=count, default=256, help="MiB that each machine writes (default: 256)")
    options, keys = parser.parse_known_args(argv)
    config = load_config([f"--job.config_file={options.config}", *keys])
    if "RANK" in os.environ:
        return check(config, options.mib)
    return launch(config, [sys.executable, "-u", "-m", "toolkit", "check-cluster", *argv], keys)
