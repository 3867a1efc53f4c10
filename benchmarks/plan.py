"""The layout that tools.plan's search ranks first on four CPU ranks, beside the fastest of those measured.

    python -m benchmarks.plan [--only TEXT] [--output benchmarks/results/plan.md]

For each model the ranks measure their rates, and the search orders its layouts by them. Of each mesh the
settings that it expects most of are measured, and beside them meshes that it leaves out: context parallelism,
and replicas of two ranks. The median of three steps counts.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_step import step_seconds
from benchmarks.machine import describe
from tests.helpers import run_world
from toolkit.config import Config
from toolkit.distributed.process_group import DTYPES
from toolkit.models.common.args import ModelArgs
from toolkit.models.registry import resolve
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.planner.layouts import with_settings
from toolkit.planner.machines import Machine
from toolkit.planner.search import search
from toolkit.planner.this_machine import this_machine

RANKS, WARM_UP, STEPS, GOAL = 4, 1, 3, 0.1
MEMORY = 2.0**36
"""Bytes, of which a small model needs none."""


@dataclass(frozen=True)
class Case:
    """A model of ``shape`` = dim, blocks, heads, kv heads, hidden dim and vocabulary, in steps of ``rows``
    samples of ``length`` tokens."""

    name: str
    shape: tuple[int, int, int, int, int, int]
    dtype: str = "float32"
    rows: int = 8
    length: int = 256

    @property
    def sizes(self) -> dict[str, int]:
        names = "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size"
        return dict(zip(names, self.shape, strict=True))

    @property
    def args(self) -> ModelArgs:
        return resolve("llama3", "debugmodel", **self.sizes)

    @property
    def config(self) -> Config:
        return Config.model_validate(
            {
                "model": {"name": "llama3", "flavor": "debugmodel", **self.sizes},
                "training": {
                    "seq_len": self.length,
                    "global_batch_size": self.rows,
                    "mixed_precision_param": self.dtype,
                    "max_norm": 1.0,
                },
                "data": {"document_mask": False},
            }
        )


SMALL, MIDDLE = (256, 4, 4, 2, 768, 4096), (512, 8, 8, 4, 1536, 8192)
CASES = [
    Case("5.2M", SMALL),
    Case("5.2M", SMALL, "bfloat16"),
    Case("5.2M, 1,024 tokens", SMALL, rows=4, length=1024),
    Case("5.2M, 16 samples of 128 tokens", SMALL, rows=16, length=128),
    Case("5.2M, 4 samples", SMALL, "bfloat16", rows=4),
    Case("deep: 16 blocks of 128", (128, 16, 4, 4, 384, 2048)),
    Case("wide: 4 blocks of 512", (512, 4, 8, 8, 2048, 4096), "bfloat16"),
    Case("a vocabulary of 32,768", (256, 4, 4, 4, 768, 32768), "bfloat16"),
    Case("33.6M", MIDDLE),
    Case("33.6M", MIDDLE, "bfloat16"),
]
_P = "parallelism."
OTHERS: list[dict[str, Any]] = [
    {f"{_P}context_parallel_degree": 2, "training.local_batch_size": 2},
    {f"{_P}context_parallel_degree": 4, "training.local_batch_size": 4},
    {f"{_P}data_parallel_replicate_degree": 2, "training.local_batch_size": 1},
    {
        f"{_P}context_parallel_degree": 2,
        f"{_P}tensor_parallel_degree": 2,
        "training.local_batch_size": 4,
    },
]


def rates(case: Case) -> Machine:
    """The machine as its ranks see it, in a rank."""
    torch.set_num_threads(1)
    return this_machine(
        case.args, tokens=case.rows * case.length // RANKS, seq_len=case.length, dtype=DTYPES[case.dtype],
        attention="blockwise",
    )  # fmt: skip


def measure(case: Case, configs: list[Config]) -> list[float]:
    """Seconds of a step of each config, in a rank."""
    torch.set_num_threads(1)
    seconds = []
    for config in configs:
        seconds.append(step_seconds(config, case.args, warm_up=WARM_UP, steps=STEPS))
        gc.collect()
    return seconds


def compare(case: Case, *, verbose: bool) -> tuple[str, float]:
    """A row, and how much slower the layout that is ranked first is than the fastest."""
    machine = replace(run_world(rates, RANKS, case, timeout=60)[0], memory=MEMORY, node=RANKS)
    config = case.config
    found = search(config, case.args, RANKS, machine, param_dtype=DTYPES[case.dtype], top=1 << 20)
    best: dict[ParallelDims, Config] = {}
    forecast = []
    for each in found.ranked:
        if each.layout not in best:
            best[each.layout] = each.config
            forecast.append(each.seconds)
    tried = [with_settings(config, settings) for settings in OTHERS]
    for other in tried:
        dims = degrees(other.parallelism, RANKS)
        assert dims and dims not in best
        best[dims] = other
    seconds = run_world(measure, RANKS, case, list(best.values()), timeout=400)[0]
    if verbose:
        for place, (layout, took) in enumerate(zip(best, seconds, strict=True)):
            expected = f"{1e3 * forecast[place]:.0f}" if place < len(forecast) else "none"
            print(f"  {layout}: measured {1e3 * took:.0f}, forecast {expected}", flush=True)
    fastest = min(range(len(seconds)), key=seconds.__getitem__)
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    slower = seconds[0] / seconds[fastest] - 1
    names = [_name(layout) for layout in best]
    cells = [case.name, case.dtype]
    for place in (0, fastest, slowest):
        cells += [names[place], f"{1e3 * seconds[place]:.0f}"]
    return f"| {' | '.join([*cells, f'{slower:+.0%}', str(len(seconds))])} |", slower


def _name(layout: ParallelDims) -> str:
    return ", ".join(f"{name} {size}" for name, size in asdict(layout).items() if size > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/plan.md"))
    parser.add_argument("--only", default="", help="models whose names have it, each mesh printed")
    asked = parser.parse_args()
    machine = describe()
    chosen = [case for case in CASES if asked.only in f"{case.name} {case.dtype}"]
    rows, near = [], 0
    for case in chosen:
        row, slower = compare(case, verbose=bool(asked.only))
        near += slower <= GOAL
        rows.append(row)
        print(row, flush=True)
    print(f"{near} of {len(chosen)} within {GOAL:.0%}")
    if asked.only:
        return
    head = [
        "# The layout that is ranked first, and the fastest", "",
        f"`python -m benchmarks.plan`, on {machine}", "",
        f"{RANKS} ranks of one thread. For {near} of {len(chosen)} models the layout that the search ranks "
        f"first is within {GOAL:.0%} of the fastest of all measured, one a mesh. Times of a step in ms.", "",
        "| model | dtype | ranked first | ms | the fastest | ms | the slowest | ms | slower | meshes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    asked.output.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
