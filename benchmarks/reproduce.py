"""Train the model of train_configs/reproduce/books_15m.toml on two CPU ranks; publish its losses and samples.

    python -m benchmarks.reproduce [--folder FOLDER] [--output benchmarks/results/reproduce.md]
                                   [--losses benchmarks/results/reproduce.json] [--plot docs/reproduce.png]

A run that was stopped goes on from its last checkpoint. Needs matplotlib (extra ``plot``) for the plot.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.curves import save
from benchmarks.machine import describe

CONFIG = "train_configs/reproduce/books_15m.toml"
RANKS = 2
EVERY = 40
PROMPTS = ("It was a dark night, and", '"Where have you been?" said', "The captain of the ship")
SAMPLE = ["--max-new-tokens", "120", "--temperature", "0.7", "--top-p", "0.95", "--seed", "0"]

Records = list[dict[str, float]]


def train(folder: Path, *flags: str) -> Records:
    """Train, or go on, in ``folder``; return the logged values of each step."""
    environment = os.environ | {"CONFIG_FILE": CONFIG, "NGPU": str(RANKS)}
    command = ["./run_train.sh", f"--job.dump_folder={folder}", "--metrics.log_freq=1", *flags]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    by_step: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step) if step]


def samples(folder: Path) -> list[str]:
    """Text that the trained model writes after each of ``PROMPTS``."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = [sys.executable, "-m", "toolkit", "generate", str(folder), "--json", "--dtype", "float32"]
    done = subprocess.run([*command, *prompts, *SAMPLE], check=True, capture_output=True, text=True)
    return [json.loads(line)["text"] for line in done.stdout.splitlines()]


def report(records: Records, texts: list[str], command: str, machine: str) -> str:
    """The tables in Markdown."""
    lines = [
        "# A run to reproduce",
        "",
        f"`{command}`: {CONFIG} on {RANKS} ranks. {machine}",
        "",
        "| step | loss | validation loss |",
        "|---|---|---|",
    ]
    for record in records:
        if record["step"] == 1 or record["step"] % EVERY == 0:
            validation = f"{record['validation_loss']:.4f}" if "validation_loss" in record else ""
            lines.append(f"| {record['step']} | {record['loss']:.4f} | {validation} |")
    lines += [
        "",
        f"Samples (`llama-toolkit generate … {' '.join(SAMPLE)}`), each after its prompt in bold:",
        "",
    ]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        lines += [f"> **{prompt}**{' '.join(text.removeprefix(prompt).split()).join((' ', ''))}", ""]
    return "\n".join(lines)


def draw(records: Records, output: Path) -> None:
    """Draw the losses into the PNG ``output``."""
    from toolkit.commands.plot import pyplot

    figure, cell = pyplot().subplots(figsize=(8, 4))
    for key, label in (("loss", "training"), ("validation_loss", "validation")):
        found = [(it["step"], it[key]) for it in records if key in it]
        cell.plot(*zip(*found, strict=True), linewidth=1, label=label)
    cell.set(xlabel="step", ylabel="loss, nats per token")
    cell.legend(frameon=False)
    save(figure, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "books_15m"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--losses", type=Path, help="JSON file of the losses to write")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args()
    machine = describe(timed=False)
    records = train(options.folder)
    text = report(records, samples(options.folder), "python -m benchmarks.reproduce", machine)
    print(text)
    if options.output:
        options.output.write_text(text)
    if options.losses:
        options.losses.write_text(json.dumps([it["loss"] for it in records if "loss" in it]) + "\n")
    if options.plot:
        draw(records, options.plot)


if __name__ == "__main__":
    main()
