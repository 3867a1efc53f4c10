"""Time and memory of ``debug.bitwise_data_parallel`` beside the same step without it, on two CPU ranks.

    python -m benchmarks.bitwise [--repeats 9] [--output benchmarks/results/bitwise.md]

Both step in turns in the same processes, on the 33.6M model of ``benchmarks.peers``. Memory is the peak of
resident memory of two steps in processes of their own, above the other's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.peer_models import MAX_NORM, SEED, Case, batches, configuration
from benchmarks.peers import counted_twice, give_back, time_in_turns
from tests.helpers import run_world
from toolkit.build import build_model
from toolkit.config import Config
from toolkit.distributed.process_group import DTYPES
from toolkit.metrics.memory import resident_bytes
from toolkit.optim.optimizer import build_optimizer
from toolkit.parallel.mesh import build_mesh
from toolkit.train_step import TrainStep

CASE = Case("33.6M", 2, 1, "bfloat16", 1, 512)
MICRO_BATCHES = (1, 4)
WAYS = {"plain": False, "bitwise": True}
LIMIT_SECONDS = 400.0


def step_of(case: Case, count: int, *, bitwise: bool) -> Callable[[], tuple[float, float]]:
    """A step of ``count`` micro-batches."""
    tables = configuration(case).model_dump()
    config = Config.model_validate(tables | {"debug": tables["debug"] | {"bitwise_data_parallel": bitwise}})
    device, mesh = torch.device("cpu"), build_mesh(torch.device("cpu"), dp_shard=case.ranks)
    parts = build_model(config, case.args, mesh, device, param_dtype=DTYPES[case.dtype], seed=SEED)
    optimizer = build_optimizer(parts.named_parameters(), config)
    train_step = TrainStep(parts, optimizer, max_norm=MAX_NORM, device=device)
    given: list[Any] = [
        {"tokens": tokens, "labels": labels, "positions": None, "documents": None}
        for tokens, labels in batches(case, count)
    ]

    def step() -> tuple[float, float]:
        result = train_step(list(given), learning_rate=1e-4)
        return result.loss, result.grad_norm

    return step


def time_one(case: Case, count: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of the steps of both."""
    torch.set_num_threads(1)
    steps = {name: step_of(case, count, bitwise=bitwise) for name, bitwise in WAYS.items()}
    return time_in_turns(steps, [()] * (2 + repeats), case.dtype)["seconds"]


def size_one(case: Case, count: int, bitwise: bool) -> int:
    """Peak bytes of this rank in two steps."""
    torch.set_num_threads(1)
    give_back()
    step = step_of(case, count, bitwise=bitwise)
    step()
    Path("/proc/self/clear_refs").write_text("5")
    step()
    step()
    return resident_bytes()[1] - counted_twice()


def row(count: int, repeats: int) -> str:
    """Measure a number of micro-batches: a row of the table."""
    seconds = run_world(time_one, CASE.ranks, CASE, count, repeats, timeout=LIMIT_SECONDS)[0]
    ratio = statistics.median(b / a for a, b in zip(seconds["plain"], seconds["bitwise"], strict=True))
    plain, bitwise = (statistics.median(seconds[name]) for name in WAYS)
    sizes = [
        max(run_world(size_one, CASE.ranks, CASE, count, way, timeout=LIMIT_SECONDS)) for way in WAYS.values()
    ]
    more = (sizes[1] - sizes[0]) / 2**20
    return f"| {count} | {plain:.2f} | {bitwise:.2f} | {ratio:.2f} | {more:+,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    lines = [
        "# The same bits at any data-parallel size: cost",
        "",
        f"`python -m benchmarks.bitwise --repeats {options.repeats}`: steps of {CASE.shape} on {CASE.ranks} "
        f"ranks of one thread, {CASE.dtype}, {CASE.rows} × {CASE.length} tokens per micro-batch and rank, "
        f"with and without `debug.bitwise_data_parallel` in turns, medians. {describe()}",
        "",
        "| micro-batches | plain, s | bitwise, s | times plain | peak MiB of a rank |",
        "|---|---|---|---|---|",
    ]
    for count in MICRO_BATCHES:
        lines.append(row(count, options.repeats))
        print(lines[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
