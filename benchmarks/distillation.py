"""Train a small model on the embedded text alone and with a teacher, at equal tokens.

    python -m benchmarks.distillation [--steps 600] [--folder FOLDER]
                                      [--output benchmarks/results/distillation.md]
                                      [--plot docs/distillation.png]

The teacher is the model of train_configs/debug_model.toml, trained for as many steps; the students have fewer
and narrower blocks. A weight of 0 trains on the labels alone, but logs the divergence from the teacher too.
Runs are kept in FOLDER as they end, and what is there is not run again. Needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.curves import place_of, save, train
from benchmarks.machine import describe
from benchmarks.moe_balance import plot_smooth, records, smooth

TEACHER = "teacher"
STUDENT = ["--model.dim=192", "--model.n_layers=2", "--model.ffn_dim=704"]
RUNS = {
    "labels alone": ["--distillation.weight=0"],
    "teacher, weight 0.5": ["--distillation.weight=0.5"],
    "teacher, weight 0.9": ["--distillation.weight=0.9"],
}
DIVERGENCE = "distillation/divergence"


def report(folder: Path, steps: int, command: str, machine: str) -> str:
    """The table in Markdown."""
    lines = [
        "# Distillation",
        "",
        f"`{command}`: {steps} steps of train_configs/debug_model.toml as the teacher, and of students with "
        f"{' '.join(f'`{it}`' for it in STUDENT)}, on the same tokens. The divergence is the mean "
        f"of the last 50 steps of training. {machine}",
        "",
        "| run | validation loss | divergence from the teacher |",
        "|---|---|---|",
    ]
    for name in (TEACHER, *RUNS):
        found = records(folder, name)
        validation = [it["validation_loss"] for it in found if "validation_loss" in it]
        divergences = [it[DIVERGENCE] for it in found if DIVERGENCE in it]
        divergence = f"{smooth(divergences, 50)[-1]:.3f}" if divergences else ""
        lines.append(f"| {name} | {validation[-1]:.4f} | {divergence} |")
    return "\n".join(lines) + "\n"


def draw(folder: Path, output: Path) -> None:
    """Losses, and divergences from the teacher, into the PNG ``output``."""
    from toolkit.commands.plot import pyplot

    figure, (above, below) = pyplot().subplots(2, 1, figsize=(8, 7), sharex=True)
    for number, name in enumerate((TEACHER, *RUNS)):
        found = records(folder, name)
        loss = "loss" if name == TEACHER else "distillation/cross_entropy"
        plot_smooth(above, found, loss, name, number)
        plot_smooth(below, found, DIVERGENCE, name, number)
    above.set(ylabel="cross-entropy, nats per token", ylim=(None, 7))
    below.set(xlabel="step", ylabel="divergence (both: mean of 20 steps)", yscale="log")
    above.legend(fontsize=8, frameon=False)
    save(figure, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "distillation"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args()
    machine, folder = describe(), options.folder / str(options.steps)
    common = [f"--training.steps={options.steps}"]
    exported = [
        "--checkpoint.enable=true",
        "--checkpoint.last_save_in_hf",
        "--checkpoint.export_dtype=float32",
    ]
    train(folder, TEACHER, 2, [*common, *exported])
    teacher = place_of(folder, TEACHER) / "hf" / f"step-{options.steps}"
    distilled = ["--distillation.enable", f"--distillation.teacher_path={teacher}", *STUDENT]
    for name, flags in RUNS.items():
        train(folder, name, 2, [*common, *distilled, *flags])
    text = report(
        folder, options.steps, f"python -m benchmarks.distillation --steps {options.steps}", machine
    )
    print(text)
    if options.output:
        options.output.write_text(text)
    if options.plot:
        draw(folder, options.plot)


if __name__ == "__main__":
    main()
