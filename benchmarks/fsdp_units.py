"""Seconds of a training step on CPU ranks by what is one unit of FSDP, the ways in turns in one world.

    python -m benchmarks.fsdp_units [--shapes 5.2M 33.6M] [--dtype bfloat16] [--ranks 2] [--steps 20]
                                    [--output benchmarks/results/fsdp_units.md]

The step is that of benchmarks/peer_models.py and the batch that of benchmarks/peers.py, a thread a rank.
Losses of all ways have to be equal. Beside the medians are the middle halves of the steps, and of the ratios
to units of one block, step by step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.machine import describe
from benchmarks.peer_models import SHAPES, Case, batches, configuration, ours
from benchmarks.peers import cases
from tests.helpers import run_world
from toolkit.config import Config

WAYS: dict[str, dict[str, Any]] = {
    "each block": {},
    "each block, kept for backward": {"fsdp_reshard_after_forward": "never"},
    "all in one": {"fsdp_wrap_policy": "size"},
}
WARM_UP = 2
CLOSE = 1e-4
LIMIT_SECONDS = 900.0


def measure(case: Case, steps: int) -> dict[str, list[float]]:
    """Seconds of each step of this world, by way.

    Raises:
        RuntimeError: the losses of two ways differ.
    """
    tables = configuration(case).model_dump()
    run = {
        way: ours(case, Config.model_validate(tables | {"parallelism": tables["parallelism"] | options}))
        for way, options in WAYS.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in run}
    for number, (tokens, labels) in enumerate(batches(case, WARM_UP + steps)):
        losses = []
        first = number % len(run)
        for way in [*run][first:] + [*run][:first]:
            dist.barrier()
            start = time.perf_counter()
            losses.append(run[way](tokens, labels)[0])
            dist.barrier()
            if number >= WARM_UP:
                seconds[way].append(time.perf_counter() - start)
        if max(losses) - min(losses) > CLOSE * max(losses):
            raise RuntimeError(f"the losses of step {number + 1} differ: {losses}")
    return seconds


def lines(shape: str, dtype: str, seconds: dict[str, list[float]]) -> list[str]:
    """Rows of the table."""
    plain = seconds["each block"]
    return [
        f"| {shape}, {dtype} | {way} | {_middle([1000 * it for it in found], '.0f')} | "
        f"{_middle([a / b for a, b in zip(plain, found, strict=True)], '.2f')} |"
        for way, found in seconds.items()
    ]


def _middle(values: list[float], form: str) -> str:
    low, half, high = statistics.quantiles(values, n=4)
    return f"{half:{form}} ({low:{form}} to {high:{form}})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["5.2M", "33.6M"])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    machine = describe()
    table = ["| | a unit | a step, ms | times as fast |", "|---|---|---|---|"]
    for shape in asked.shapes:
        [case, *_] = cases("pretrain", [shape], [asked.dtype])
        case = replace(case, ranks=asked.ranks, rows=max(1, case.rows * case.ranks // asked.ranks))
        seconds = run_world(measure, asked.ranks, case, asked.steps, timeout=LIMIT_SECONDS)[0]
        table += lines(shape, asked.dtype, seconds)
    print("\n".join(table))
    if asked.output:
        size = f"--ranks {asked.ranks} --steps {asked.steps}"
        command = f"`python -m benchmarks.fsdp_units --dtype {asked.dtype} {size}`, on {machine}"
        text = "\n".join(["# Units of FSDP on CPU ranks", "", command, "", *table])
        asked.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
