"""Compare training in float8, emulated on a CPU, with training in bf16: the debug run in each recipe.

    python -m benchmarks.float8 [--only RUN …] [--steps 200] [--folder FOLDER]
                                [--output benchmarks/results/float8.md]

The same weights and samples; another seed in bf16 says how far apart two runs are that differ in these. Runs
are kept in FOLDER: what has ended is not run again, and what was stopped goes on from its last checkpoint.
Needs torchao (extra ``float8``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.curves import CONFIG, losses
from benchmarks.machine import describe

BF16, LIMIT, MEAN = "bf16", 2e-2, 10
_FLOAT8 = ["--model.converters=float8", "--quantize.linear.float8.emulate"]
RUNS: dict[str, list[str]] = {
    BF16: [],
    "tensorwise": _FLOAT8,
    "rowwise": [*_FLOAT8, "--quantize.linear.float8.recipe_name=rowwise"],
    "rowwise_with_gw_hp": [*_FLOAT8, "--quantize.linear.float8.recipe_name=rowwise_with_gw_hp"],
    "bf16, another seed": ["--debug.seed=1"],
}


def train(folder: Path, name: str, steps: int) -> list[float]:
    """The losses of the run ``name``, which has ended in ``folder`` or is run there."""
    place = folder / name.replace(", ", "_").replace(" ", "_")
    if not (place / "done").exists():
        flags = [
            f"--job.dump_folder={place}",
            f"--training.steps={steps}",
            "--training.mixed_precision_param=bfloat16",
            "--metrics.log_freq=1",
            "--compile.enable",
            "--validation.enable=false",
            *RUNS[name],
        ]
        environment = os.environ | {"CONFIG_FILE": CONFIG, "NGPU": "1"}
        subprocess.run(["./run_train.sh", *flags], env=environment, check=True, stdout=subprocess.DEVNULL)
        (place / "done").touch()
    return losses(place)


def report(runs: dict[str, list[float]], steps: int, machine: str) -> str:
    """The table in Markdown."""
    left = [name for name in runs if name != BF16]
    only = "" if runs.keys() == RUNS.keys() else " --only " + " ".join(f'"{name}"' for name in left)
    rows = [
        f"# float8, emulated, {steps} steps",
        "",
        f"`python -m benchmarks.float8{only} --steps {steps}`: {CONFIG} on one process, compiled. {machine}",
        "",
        f"| run | loss, mean of the last {MEAN} steps | less bf16's | largest difference of a step |",
        "|---|---|---|---|",
    ]
    for name, run in runs.items():
        mean, exact = (sum(it[-MEAN:]) / MEAN for it in (run, runs[BF16]))
        largest = max(abs(a - b) for a, b in zip(run, runs[BF16], strict=True))
        rows.append(f"| {name} | {mean:.4f} | {mean - exact:+.4f} | {largest:.4f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="these runs, and bf16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "float8"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    machine = describe()
    chosen = [name for name in RUNS if name in (BF16, *options.only)]
    runs = {name: train(options.folder / str(options.steps), name, options.steps) for name in chosen}
    text = report(runs, options.steps, machine)
    print(text)
    if options.output:
        options.output.write_text(text)
    mean = {name: sum(run[-MEAN:]) / MEAN for name, run in runs.items()}
    far = [name for name in chosen if RUNS[name][:1] == _FLOAT8[:1] and abs(mean[name] - mean[BF16]) > LIMIT]
    if far:
        raise SystemExit(f"further than {LIMIT} from bf16: {', '.join(far)}")


if __name__ == "__main__":
    main()
