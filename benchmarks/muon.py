"""Compare Muon with AdamW: losses of the debug run, and seconds of a step on two ranks.

    python -m benchmarks.muon [--part loss|step] [--steps 600] [--times 9] [--folder FOLDER]
                              [--results benchmarks/results]

Losses: the same run with each optimizer at the same options, and with AdamW from another seed, whose distance
says how much of a difference is noise. Runs are kept in FOLDER as they end, and what is there is not run
again. Steps: those of both optimizers in the same processes, in turns, on the same tokens
(benchmarks/peers.py). Without --part both are measured; results of the other part are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.curves import CONFIG, train
from benchmarks.machine import describe
from benchmarks.peer_models import Case, batches, configuration, ours
from benchmarks.peers import RESULTS, WARM_UP, spread, time_in_turns
from tests.helpers import run_world
from toolkit.config import Config

RUNS = {"AdamW": ["AdamW"], "Muon": ["Muon"], "AdamW, another seed": ["AdamW", "--debug.seed=1"]}
LAST = 20
"""Steps at the end whose mean loss is told."""
CASES = [Case("33.6M", 2, 1, dtype, 4, 512) for dtype in ("bfloat16", "float32")]
LIMIT = 1.3
"""Times AdamW's step that Muon's may take."""


def losses(folder: Path, steps: int) -> dict[str, Any]:
    """Mean losses at the end, and those of the validation."""
    found = {}
    for run, (name, *flags) in RUNS.items():
        flags = [f"--training.steps={steps}", "--training.mixed_precision_param=bfloat16", *flags]
        trained = train(folder / str(steps), run, 1, [*flags, f"--optimizer.name={name}"])
        lines = (folder / str(steps) / run.replace(" ", "_") / "metrics.jsonl").read_text().splitlines()
        held_out = [it["validation_loss"] for line in lines if "validation_loss" in (it := json.loads(line))]
        found[run] = {"loss": statistics.mean(trained[-LAST:]), "validation": held_out}
    return {"steps": steps, "runs": found}


def time_steps(case: Case, times: int) -> dict[str, Any]:
    """Seconds of each step of both, on this rank."""
    torch.set_num_threads(case.threads)
    tables = configuration(case).model_dump()
    made = {}
    for name in ("AdamW", "Muon"):
        tables["optimizer"]["name"] = name
        made[name] = ours(case, Config.model_validate(tables))
    return time_in_turns(made, list(batches(case, WARM_UP + times)), case.dtype)


def report(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    lines = ["# Muon beside AdamW", ""]
    if loss := results.get("loss"):
        every = len(loss["runs"]["AdamW"]["validation"])
        lines += [
            f"`python -m benchmarks.muon --part loss --steps {loss['steps']}`: {CONFIG} on one process, "
            f"bf16. {loss['machine']}",
            "",
            f"| | mean loss of the last {LAST} steps | validation, {every} times |",
            "|---|---|---|",
        ]
        for name, run in loss["runs"].items():
            lines.append(
                f"| {name} | {run['loss']:.4f} | {', '.join(f'{it:.4f}' for it in run['validation'])} |"
            )
        lines.append("")
    if step := results.get("step"):
        lines += [
            f"`python -m benchmarks.muon --part step --times {step['times']}`: 33.6M parameters, two ranks "
            f"of a thread, {CASES[0].tokens:,} tokens a step. {step['machine']}",
            "",
            "| | seconds of a step | Muon's | times AdamW's |",
            "|---|---|---|---|",
        ]
        for dtype, seconds in step["seconds"].items():
            cells = [spread(seconds["AdamW"], 2), spread(seconds["Muon"], 2), spread(ratios(seconds), 2)]
            lines.append(f"| {dtype} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    """Muon's seconds of each turn over AdamW's."""
    return [mine / other for mine, other in zip(seconds["Muon"], seconds["AdamW"], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("loss", "step"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--times", type=int, default=9, help="timed steps of each")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "muon"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files that are written")
    options = parser.parse_args()
    file = options.results / "muon.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    machine = describe()
    if options.part != "step":
        results["loss"] = losses(options.folder, options.steps) | {"machine": machine}
    if options.part != "loss":
        seconds = {}
        for case in CASES:
            seconds[case.dtype] = run_world(time_steps, 2, case, options.times, timeout=420)[0]["seconds"]
        results["step"] = {"times": options.times, "seconds": seconds, "machine": machine}
    options.results.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    text = report(results)
    file.with_suffix(".md").write_text(text)
    print(text)
    slow = [
        dtype
        for dtype, seconds in results.get("step", {}).get("seconds", {}).items()
        if statistics.median(ratios(seconds)) > LIMIT
    ]
    if options.part != "loss" and slow:
        raise SystemExit(f"Muon's step takes more than {LIMIT} times AdamW's in {', '.join(slow)}")


if __name__ == "__main__":
    main()
