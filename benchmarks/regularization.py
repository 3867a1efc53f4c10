"""Measure what noise on embeddings (NEFTune) and the moving average of the weights (EMA) give a small model.

    python -m benchmarks.regularization [--folder FOLDER] [--output benchmarks/results/regularization.md]

The noise: LoRA learns a fifth of the questions of `benchmarks.finetune_task`, and is asked those whose words
it has not seen together. The average: the debug model, with a learning rate that decays to 0 and with a
constant one. Runs are kept in FOLDER as they end, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import finetune_task as task
from benchmarks.machine import describe

LEARNT = task.TRAINED_ON // 5
ALPHAS = (0, 5, 15)
STEPS = 300
RATES = {
    "decays to 0": [],
    "constant": ["--lr_scheduler.decay_type=constant"],
}
DECAYS = (0.9, 0.99)


def noise(folder: Path) -> list[str]:
    """Rows of the table of NEFTune."""
    to_learn, held_out = task.split(trained_on=LEARNT)
    task.write(folder / "train.jsonl", to_learn)
    task.write(folder / "held_out.jsonl", held_out)
    task.run(folder / "base", task.BASE, [f"--training.steps={task.BASE_STEPS}"])
    rows = []
    for alpha in ALPHAS:
        place = folder / f"alpha_{alpha}"
        flags = [*task.flags_of("LoRA", folder), f"--finetune.neftune_noise_alpha={alpha}"]
        records = task.run(place, task.CONFIG, flags if alpha else flags[:-1])
        losses = [record["validation_loss"] for record in records if "validation_loss" in record]
        right = task.accuracy(task.answers(task.load(place), held_out), held_out)
        rows.append(f"| {alpha or 'none'} | {right:.1%} | {losses[-1]:.4f} |")
        print(rows[-1], flush=True)
    return rows


def average(folder: Path) -> list[str]:
    """Rows of the table of the average."""
    rows = []
    for rate, flags in RATES.items():
        for decay in DECAYS:
            place = folder / f"{rate.split()[0]}_{decay}"
            asked = [f"--training.steps={STEPS}", f"--optimizer.ema_decay={decay}", *flags]
            records = task.run(place, task.BASE, asked)
            last = next(record for record in reversed(records) if "validation_loss" in record)
            losses = [f"{last[f'validation_{name}']:.4f}" for name in ("loss", "ema_loss")]
            rows.append(f"| {rate} | {decay} | {' | '.join(losses)} |")
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "regularization"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine, folder = describe(), options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Noise on embeddings, and the average of the weights",
        "",
        f"`python -m benchmarks.regularization`. {machine}",
        "",
        f"NEFTune: {task.STEPS} steps of LoRA on {LEARNT:,} questions of `benchmarks.finetune_task`, then "
        f"{task.HELD_OUT:,} questions whose words no training question shows together.",
        "",
        "| alpha | right | validation loss |",
        "|---|---|---|",
        *noise(folder),
        "",
        f"EMA: {STEPS} steps of {task.BASE} on the embedded text.",
        "",
        "| learning rate | decay | validation loss | of the average |",
        "|---|---|---|---|",
        *average(folder),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
