"""Measures how long the heap of ranks on gloo holds, with one worker thread a group and with torch's two.

    python -m benchmarks.gloo_heap --threads 2 --seconds 60
    python -m benchmarks.gloo_heap --threads 2 --worlds 3000 [--layout "pp2 tp2 …"] [--folder FOLDER]
                                   [--output benchmarks/results/gloo_heap.md]

The first is the smallest program found that breaks it: one process, one rank, all-gathers of one number. The
second forms worlds of 8 ranks, trains two steps in each and leaves them; a layout is a line of words of
tests/meshes.py. What was run is kept in FOLDER, and counts again: stop the command at any time and give it
once more, or `--worlds 0` for the table alone. Processes are new every few worlds, and after one died.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import describe
from tests import mesh_runs
from tests.training import small_trainer
from toolkit.distributed import process_group

LAYOUTS = (
    "pp2 replicate2 tp2 ZBVZeroBubble NO_SHARD",
    "pp2 cp2 tp2 ZBVZeroBubble never",
    "shard2 cp2 tp2",
)
STEPS = 2
WORLDS_A_PROCESS = 20
LIMIT_SECONDS = 60.0
"""For a world, on a busy machine too."""
IN_FLIGHT = 512

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.mesh_runs", "tests.training"])


def gather(threads: int, seconds: float) -> int:
    """All-gathers in a group of one rank, many in flight; returns how many were made."""
    _use(threads)
    process_group.start(torch.device("cpu"), timeout_seconds=60)
    one, group, made = torch.ones(1), dist.group.WORLD, 0
    assert group
    operators, until = torch.ops._c10d_functional, time.monotonic() + seconds
    while time.monotonic() < until:
        gathered = [operators.all_gather_into_tensor(one, 1, group.group_name) for _ in range(IN_FLIGHT)]
        for tensor in gathered:
            operators.wait_tensor(tensor)
        made += IN_FLIGHT
    return made


def _use(threads: int) -> None:
    """Have the groups of a run made with one thread, as the toolkit does, or as torch does."""
    if threads != 1:
        dist.Backend.register_backend(process_group.GLOO, dist.ProcessGroupGloo, devices=["cpu"])


# Worlds


def _rank(rank: int, ports: list[int], folder: str, layout: str, threads: int, ended: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="8", LOCAL_WORLD_SIZE="8", MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    torch.set_num_threads(1)
    _use(threads)
    config = mesh_runs.configure(folder, layout)
    training = config.training.model_copy(update={"steps": STEPS})
    validation = config.validation.model_copy(update={"enable": False})
    config = config.model_copy(update={"training": training, "validation": validation})
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        process_group.start(torch.device("cpu"), timeout_seconds=60)
        with contextlib.redirect_stdout(io.StringIO()):
            small_trainer(config).train()
        dist.barrier()
        process_group.stop()
        gc.collect()  # else threads and sockets of the groups stay
        if rank == 0:
            ended.value += 1


def run_batch(folder: Path, layout: str, threads: int, worlds: int) -> dict[str, Any]:
    """Run worlds in the same eight processes; tell how many ended, and how processes died that did."""
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(worlds)]
    ports = [store.port for store in stores]
    ended = _CONTEXT.Value("i", 0)
    ranks = [
        _CONTEXT.Process(target=_rank, args=(rank, ports, str(folder), layout, threads, ended))
        for rank in range(8)
    ]
    try:
        for process in ranks:
            process.start()
        left, until = {process.sentinel for process in ranks}, time.monotonic() + LIMIT_SECONDS * worlds
        while left and time.monotonic() < until:
            left -= set(wait(left, timeout=1))
            if any(process.exitcode for process in ranks):  # its peers fail of it, or wait in vain
                wait(left, timeout=2)
                break
        codes = [process.exitcode for process in ranks]
    finally:
        for running in multiprocessing.active_children():
            running.kill()
            running.join()
    died = [signal.Signals(-code).name for code in codes if code and code < 0]
    failed = not died and (any(codes) or None in codes)
    return {"layout": layout, "threads": threads, "worlds": ended.value, "died": died, "failed": failed}


def report(kept: list[dict[str, Any]], command: str, machine: str) -> str:
    """The table in Markdown."""
    worlds, died, failed = Counter[Any](), Counter[Any](), Counter[Any]()
    for batch in kept:
        row = batch["threads"], batch["layout"]
        worlds[row] += batch["worlds"] + bool(batch["died"])
        died[row] += bool(batch["died"])
        failed[row] += batch["failed"]
    lines = [
        "# Worlds of 8 ranks on gloo",
        "",
        f"`{command}`: each forms its groups, trains {STEPS} steps and leaves them. {machine}",
        "",
        "| threads a group | layout | worlds | a process died of a signal | failed otherwise |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row[0]} | {row[1]} | {worlds[row]} | {died[row]} | {failed[row]} |" for row in sorted(worlds)
    ]
    for threads in sorted({row[0] for row in worlds}):
        total, dead = (sum(count[row] for row in worlds if row[0] == threads) for count in (worlds, died))
        lines.append(f"| {threads} | **all** | {total} | {dead} | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1, help="of a group")
    parser.add_argument("--seconds", type=float, help="gather in one process for so long")
    parser.add_argument("--worlds", type=int, default=3000)
    parser.add_argument("--layout", action="append", help=f"default: {', '.join(LAYOUTS)}")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "gloo_heap"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    if options.seconds:
        print(f"{gather(options.threads, options.seconds):,} all-gathers")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a stop reaches the ranks
    machine = describe()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "batches.jsonl"
    kept = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    layouts = itertools.cycle(options.layout or LAYOUTS)
    while (left := options.worlds - _run(kept, options.threads)) > 0:
        batch = run_batch(options.folder, next(layouts), options.threads, min(left, WORLDS_A_PROCESS))
        kept.append(batch)
        with file.open("a") as lines:
            lines.write(json.dumps(batch) + "\n")
        print(batch, flush=True)
        if batch["failed"]:
            raise SystemExit("worlds fail for another reason, which the ranks have told")
    text = report(kept, "python -m benchmarks.gloo_heap --worlds N --threads T", machine)
    print(text)
    if options.output:
        options.output.write_text(text)


def _run(kept: list[dict[str, Any]], threads: int) -> int:
    return sum(batch["worlds"] for batch in kept if batch["threads"] == threads)


if __name__ == "__main__":
    main()
