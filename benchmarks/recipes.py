"""Measure what NEFTune, PiSSA and a moving average of the weights (EMA) give a small model.

    python -m benchmarks.recipes [--folder FOLDER] [--output benchmarks/results/recipes.md]

NEFTune and PiSSA: a LoRA learns a fifth of the questions of `benchmarks.finetune_task`, and is asked those
whose words it has not seen together. EMA: the debug model, with a learning rate that decays to 0 and with a
constant one. Runs are kept in FOLDER as they end, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks import finetune_task as task
from benchmarks.machine import describe
from toolkit.cli import run_command

LEARNT = task.TRAINED_ON // 5
RANK = 5
LORAS: dict[str, tuple[str, ...]] = {
    "LoRA": (),
    "NEFTune, alpha 5": ("--finetune.neftune_noise_alpha=5",),
    "NEFTune, alpha 15": ("--finetune.neftune_noise_alpha=15",),
    "PiSSA": ("--finetune.lora.dropout=0",),
    "PiSSA, a third of the learning rate": ("--finetune.lora.dropout=0", "--optimizer.lr=1e-3"),
}
"""Flags beside those of LoRA, by recipe."""
STEPS = 300
RATES = {
    "decays to 0": [],
    "constant": [
        "--lr_scheduler.decay_type=constant",
        "--lr_scheduler.decay_ratio=None",
        "--lr_scheduler.min_lr_factor=0",
    ],
}
DECAYS = (0.99,)


def loras(folder: Path) -> list[str]:
    """Rows of the table of LoRA's recipes."""
    to_learn, held_out = task.split(trained_on=LEARNT)
    task.write(folder / "train.jsonl", to_learn)
    task.write(folder / "held_out.jsonl", held_out)
    task.run(folder / "base", task.BASE, [f"--training.steps={task.BASE_STEPS}"])
    base, initial, residual = (folder / it for it in ("base", "pissa_initial", "pissa_residual"))
    if not initial.exists():
        shutil.rmtree(residual, ignore_errors=True)
        assert not run_command(
            "convert", ["pissa", *map(str, (base, initial, residual)), f"--rank={RANK}", "--dtype=float32"]
        )
    start = [
        f"--checkpoint.initial_load_path={residual}",
        "--checkpoint.initial_load_in_hf=true",
        f"--finetune.adapter_path={initial}",
        f"--finetune.lora.alpha={RANK}",
    ]
    rows = []
    for recipe, flags in LORAS.items():
        place = folder / recipe.replace(" ", "_").replace(",", "")
        asked = [*task.flags_of("LoRA", folder), *(start if "PiSSA" in recipe else ()), *flags]
        losses = [
            it["validation_loss"] for it in task.run(place, task.CONFIG, asked) if "validation_loss" in it
        ]
        right = task.accuracy(task.answers(task.load(place), held_out), held_out)
        rows.append(f"| {recipe} | {right:.1%} | {losses[-1]:.4f} |")
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
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "recipes"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine, folder = describe(timed=False), options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# NEFTune, PiSSA and the average of the weights",
        "",
        f"`python -m benchmarks.recipes`. {machine}",
        "",
        f"{task.STEPS} steps of LoRA of rank {RANK} on {LEARNT:,} questions of `benchmarks.finetune_task`; "
        f"{task.HELD_OUT:,} questions whose words no training question shows together.",
        "",
        "| recipe | right | validation loss |",
        "|---|---|---|",
        *loras(folder),
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
