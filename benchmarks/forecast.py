"""The forecast of a step's time on this computer beside the time that steps take.

    python -m benchmarks.forecast [--only TEXT] [--output benchmarks/results/forecast_time.md]

Each case is a world of its own: its ranks measure their rates (``toolkit.planner.this_machine``) and then
some steps, of which the median counts. The forecast is made of those rates and of a fake step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_step import step_seconds
from benchmarks.machine import describe
from benchmarks.peer_models import SHAPES
from tests.helpers import run_world
from toolkit.config import Config
from toolkit.distributed.process_group import DTYPES
from toolkit.models.common.args import ModelArgs
from toolkit.models.registry import resolve
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.planner.machines import Machine
from toolkit.planner.this_machine import this_machine
from toolkit.planner.time import StepTime, step_time

WARM_UP, STEPS = 2, 5
GOAL = 0.2


@dataclass(frozen=True)
class Case:
    """A run of ``shape`` on ``ranks`` of one thread each; ``tables`` are its config's."""

    name: str
    shape: str = "5.2M"
    ranks: int = 1
    dtype: str = "float32"
    rows: int = 4
    length: int = 256
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def args(self) -> ModelArgs:
        return resolve("llama3", "debugmodel", **SHAPES[self.shape])

    @property
    def config(self) -> Config:
        tables: dict[str, dict[str, Any]] = {
            "training": {
                "seq_len": self.length,
                "local_batch_size": self.rows,
                "mixed_precision_param": self.dtype,
                "max_norm": 1.0,
            },
            "data": {"document_mask": False},
            "activation_checkpoint": {"mode": "none"},
        }
        for name, table in self.tables.items():
            tables[name] = tables.get(name, {}) | dict(table)
        return Config.model_validate(tables)

    @property
    def mesh(self) -> ParallelDims:
        found = degrees(self.config.parallelism, self.ranks)
        assert found
        return found


FULL: dict[str, dict[str, Any]] = {"activation_checkpoint": {"mode": "full"}}
OP = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
TP: dict[str, dict[str, Any]] = {"parallelism": {"tensor_parallel_degree": 2}}
CP = {"parallelism": {"context_parallel_degree": 2}}
EVEN = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
PP: dict[str, dict[str, Any]] = {
    "parallelism": {"pipeline_parallel_degree": 2, **EVEN},
    "training": {"global_batch_size": 4},
}
INTERLEAVED: dict[str, dict[str, Any]] = {
    "parallelism": {**PP["parallelism"], "pipeline_parallel_schedule": "Interleaved1F1B"},
    "training": {"global_batch_size": 4},
}
LORA = {"finetune": {"adapter": "lora", "lora": {"rank": 16, "alpha": 32, "target_modules": ["all-linear"]}}}
CASES = [
    Case("5.2M"),
    Case("5.2M", dtype="bfloat16"),
    Case("5.2M, full checkpointing", tables=FULL),
    Case("5.2M, operators checkpointed", tables=OP),
    Case("5.2M, 2 micro-batches", rows=2, tables={"training": {"global_batch_size": 4}}),
    Case("5.2M, LoRA", tables=LORA),
    Case("33.6M", "33.6M", rows=2),
    Case("33.6M", "33.6M", rows=2, dtype="bfloat16"),
    Case("33.6M, full checkpointing", "33.6M", rows=2, dtype="bfloat16", tables=FULL),
    Case("33.6M, 1,024 tokens", "33.6M", rows=1, length=1024, dtype="bfloat16"),
    Case("5.2M, FSDP", ranks=2),
    Case("5.2M, FSDP", ranks=2, dtype="bfloat16"),
    Case("5.2M, FSDP, LoRA", ranks=2, tables=LORA),
    Case("5.2M, TP", ranks=2, tables=TP),
    Case("5.2M, TP", ranks=2, dtype="bfloat16", tables=TP),
    Case("5.2M, CP", ranks=2, tables=CP),
    Case("5.2M, PP, 1F1B", ranks=2, tables=PP),
    Case("5.2M, PP, Interleaved1F1B", ranks=2, tables=INTERLEAVED),
    Case("33.6M, FSDP", "33.6M", ranks=2, rows=2, dtype="bfloat16"),
    Case("33.6M, TP, full checkpointing", "33.6M", ranks=2, rows=2, tables={**TP, **FULL}),
    Case("5.2M, FSDP, operators checkpointed", ranks=2, dtype="bfloat16", tables=OP),
]


def measure(case: Case) -> tuple[Machine, float]:
    """Rates and the seconds of a step, in a rank."""
    torch.set_num_threads(1)
    dims = case.mesh
    rows = 1 if dims.pp > 1 else case.rows
    machine = this_machine(
        case.args, tokens=rows * case.length // dims.cp, seq_len=case.length // dims.cp,
        dtype=DTYPES[case.dtype], attention="blockwise", tp=dims.tp,
    )  # fmt: skip
    return machine, step_seconds(case.config, case.args, warm_up=WARM_UP, steps=STEPS)


def compare(case: Case) -> tuple[StepTime, float, Machine]:
    machine, seconds = run_world(measure, case.ranks, case, timeout=200)[0]
    forecast = step_time(case.config, case.args, case.mesh, machine, param_dtype=DTYPES[case.dtype])
    return forecast, seconds, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/forecast_time.md"))
    parser.add_argument("--only", default="", help="cases whose names have it, printed alone")
    asked = parser.parse_args()
    machine = describe()
    lines, near = [], 0
    chosen = [case for case in CASES if asked.only in f"{case.name} {case.dtype} {case.ranks}"]
    for case in chosen:
        ours, seconds, rates = compare(case)
        off = ours.seconds / seconds - 1
        near += abs(off) <= GOAL
        parts = {"compute": ours.compute, **ours.exposed, "bubble": ours.bubble, "update": ours.optimizer}
        shown = ", ".join(f"{name} {1e3 * value:.0f}" for name, value in parts.items() if value >= 5e-4)
        lines.append(
            f"| {case.name} | {case.dtype} | {case.ranks} | {rates.peak[case.dtype] / 1e9:.0f} | "
            f"{1e3 * seconds:.0f} | {1e3 * ours.seconds:.0f} | {off:+.0%} | {shown} |"
        )
        print(lines[-1], flush=True)
    print(f"{near} of {len(chosen)} within {GOAL:.0%}")
    if asked.only:
        return
    head = [
        "# Forecast and measured step time on this computer", "",
        f"`python -m benchmarks.forecast`, on {machine}", "",
        f"{near} of {len(chosen)} are within {GOAL:.0%}. Times in ms; one thread a rank; GFLOP/s are of "
        "the products that the ranks measure before.", "",
        "| case | dtype | ranks | GFLOP/s | measured | forecast | distance | of which |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    asked.output.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
