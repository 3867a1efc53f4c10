"""Compare moments in 8 bits with those of AdamW: losses of the debug run, and seconds of an update.

    python -m benchmarks.adamw_8bit [--steps 200] [--folder FOLDER]
                                    [--output benchmarks/results/adamw_8bit.md]

The same run is trained with each optimizer, and with AdamW from another seed: its distance says how much of a
difference is noise. An update is that of a matrix of 4,096 × 4,096 in fp32 on one thread, the median of five.
Runs are kept in FOLDER as they end, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.curves import CONFIG, train
from benchmarks.machine import describe
from tests.curves import differences
from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors

NAMES = {"AdamW": "AdamW", "AdamW8bit": "AdamW8bit", "AdamW, another seed": "AdamW"}
SIDE, TIMES = 4096, 5


def update(name: str) -> tuple[float, float]:
    """Seconds of an update, and bytes of state a parameter."""
    parameter = nn.Parameter(torch.randn(SIDE, SIDE))
    parameter.grad = torch.randn(SIDE, SIDE)
    optimizer = build_optimizer([("w", parameter)], Config(optimizer=Optimizer(name=name)))  # type: ignore[arg-type]
    optimizer.step()
    seconds = []
    for _ in range(TIMES):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    held = sum(tensor.nbytes for tensor in optimizer_tensors([("w", parameter)], optimizer).values())
    return statistics.median(seconds), held / parameter.numel()


def validation(folder: Path, name: str) -> float:
    """The validation loss after the last step of a run that has ended."""
    lines = (folder / name.replace(" ", "_") / "metrics.jsonl").read_text().splitlines()
    return [it["validation_loss"] for line in lines if "validation_loss" in (it := json.loads(line))][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "adamw_8bit"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine = describe()
    torch.set_num_threads(1)
    costs = {name: update(name) for name in sorted(set(NAMES.values()))}
    folder = options.folder / str(options.steps)
    common = [f"--training.steps={options.steps}", "--training.mixed_precision_param=float32"]
    runs = {}
    for run, name in NAMES.items():
        seed = ["--debug.seed=1"] if "seed" in run else []
        runs[run] = train(folder, run, 1, [*common, f"--optimizer.name={name}", *seed])
    command = f"python -m benchmarks.adamw_8bit --steps {options.steps}"
    lines = [
        "# Moments in 8 bits",
        "",
        f"`{command}`: {CONFIG} on one process, fp32. {machine}",
        "",
        "| | bytes of state a parameter | ns a parameter an update | mean loss of the last 20 steps "
        "| validation | largest relative difference of a step |",
        "|---|---|---|---|---|---|",
    ]
    for run, name in NAMES.items():
        seconds, held = costs[name]
        row = [
            f"{held:.2f}",
            f"{seconds / SIDE**2 * 1e9:.1f}",
            f"{statistics.mean(runs[run][-20:]):.4f}",
            f"{validation(folder, run):.4f}",
            f"{max(differences(runs[run], runs['AdamW'])):.1e}",
        ]
        lines.append(f"| {run} | {' | '.join(row)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
