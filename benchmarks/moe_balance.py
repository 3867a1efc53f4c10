"""Train a mixture of experts with and without a balancing loss, and a dense model of the same active size.

    python -m benchmarks.moe_balance [--steps 600] [--folder FOLDER]
                                     [--output benchmarks/results/moe_balance.md]
                                     [--plot docs/moe_balance.png]

All three read the same tokens in the same order. The plot has the losses, and below them the largest load of
an expert over the mean, of the worst layer. Runs are kept in FOLDER as they end, and what is there is not run
again. Needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.curves import EXPERTS_CONFIG, place_of, save, train
from benchmarks.machine import describe

LOAD = "moe/max_load"
DENSE = "dense"
# Two of eight experts of width 256 compute a token.
RUNS = {
    "experts, balanced": [],
    "experts, not balanced": ["--moe.aux_loss_coeff=0"],
    DENSE: ["--moe.aux_loss_coeff=0", "--model.name=mistral0.3", "--model.dim=256", "--model.ffn_dim=512"],
}  # fmt: skip


def records(folder: Path, name: str) -> list[dict[str, float]]:
    """The logged steps of a run, and what its validations logged."""
    return [json.loads(line) for line in (place_of(folder, name) / "metrics.jsonl").open()]


def smooth(values: list[float], over: int = 20) -> list[float]:
    """Means over the last steps."""
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - over + 1) : i + 1])
    ]


def plot_smooth(cell: Any, found: list[dict[str, float]], key: str, name: str, number: int) -> None:
    """Plot the smoothed values of ``key``, if there are any, in the color of run ``number``."""
    if values := smooth([it[key] for it in found if key in it]):
        cell.plot(range(1, len(values) + 1), values, color=f"C{number}", linewidth=1, label=name)


def report(folder: Path, steps: int, command: str, machine: str) -> str:
    """The table in Markdown."""
    lines = [
        "# Experts, balanced or not, beside a dense model",
        "",
        f"`{command}`: {steps} steps of {EXPERTS_CONFIG} in fp32, and of a dense "
        f"Mistral with the same active size. {machine}",
        "",
        "| run | loss, mean of the last 20 steps | validation loss | largest load over mean, last 20 steps |",
        "|---|---|---|---|",
    ]
    for name in RUNS:
        found = records(folder, name)
        losses = smooth([it["loss"] for it in found if "loss" in it])
        loads = smooth([it[LOAD] for it in found if LOAD in it])
        validation = [it["validation_loss"] for it in found if "validation_loss" in it]
        load = f"{loads[-1]:.2f}" if loads else ""
        lines.append(f"| {name} | {losses[-1]:.4f} | {validation[-1]:.4f} | {load} |")
    return "\n".join(lines) + "\n"


def draw(folder: Path, output: Path) -> None:
    """Losses, and the largest loads, into the PNG ``output``."""
    from toolkit.commands.plot import pyplot

    figure, (above, below) = pyplot().subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    for number, name in enumerate(RUNS):
        found = records(folder, name)
        for cell, key in ((above, "loss"), (below, LOAD)):
            plot_smooth(cell, found, key, name, number)
    above.set(ylabel="loss, nats per token (mean of 20 steps)")
    below.set(xlabel="step", ylabel="largest load over mean", ylim=(1, 4))
    above.legend(fontsize=8, frameon=False)
    save(figure, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "moe_balance"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args()
    machine, folder = describe(), options.folder / str(options.steps)
    common = [f"--training.steps={options.steps}", "--training.mixed_precision_param=float32"]
    for name, arguments in RUNS.items():
        train(folder, name, 1, [*common, *arguments], EXPERTS_CONFIG)
    command = f"python -m benchmarks.moe_balance --steps {options.steps}"
    text = report(folder, options.steps, command, machine)
    print(text)
    if options.output:
        options.output.write_text(text)
    if options.plot:
        draw(folder, options.plot)


if __name__ == "__main__":
    main()
