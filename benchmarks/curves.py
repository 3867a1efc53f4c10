"""Compare the curves of one run on any mesh: the debug run on eight layouts of eight ranks and one process.
With ``--layouts experts``, a mixture of experts on layouts with expert parallelism; with ``bitwise``, other
numbers of ranks with ``debug.bitwise_data_parallel`` and without.

    python -m benchmarks.curves [--steps 200] [--precision float32] [--layouts mesh] [--folder FOLDER]
                                [--output benchmarks/results/curves.md] [--plot docs/curves.png]

The curves lie over one another in one plot, and below it the relative difference of each from one process.
In bf16, where rounding differs from layout to layout by itself, the curve of another seed is run as well:
its distance says how much of a difference is noise. Runs are kept in FOLDER as they end, and what is there
is not run again. Needs matplotlib (extra ``plot``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from tests.curves import differences
from toolkit.commands import compare_runs

CONFIG = "train_configs/debug_model.toml"
_PIPELINE = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
# Four stages of the four blocks.
_EVEN = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
_LOOPED = _EVEN | {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "LoopedBFS"}
_ZERO_BUBBLE = _EVEN | {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_schedule": "ZBVZeroBubble",
    "fsdp_reshard_after_forward": "never",
}

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_shard 8": {},
    "dp_replicate 2 × dp_shard 4": {"data_parallel_replicate_degree": 2},
    "dp_shard 4 × tp 2": {"tensor_parallel_degree": 2},
    "dp_shard 4 × cp 2": {"context_parallel_degree": 2},
    "dp_shard 4 × pp 2": _PIPELINE,
    "dp_shard 2 × cp 2 × tp 2": {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    "cp 2 × tp 2 × pp 2": _LOOPED | {"context_parallel_degree": 2, "tensor_parallel_degree": 2},
    "dp_replicate 2 × tp 2 × pp 2": _ZERO_BUBBLE
    | {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1, "tensor_parallel_degree": 2},
}
"""Options of ``parallelism`` for eight ranks."""

EXPERTS_CONFIG = "train_configs/debug_moe.toml"
_EP = "expert_parallel_degree"
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard 2, ep 2": (2, {_EP: 2}),
    "dp_shard 4, ep 4": (4, {_EP: 4}),
    "dp_shard 2 × tp 2, ep 2": (4, {_EP: 2, "tensor_parallel_degree": 2}),
}
"""Ranks and options of ``parallelism``."""

BITWISE = ["--debug.bitwise_data_parallel=true", "--optimizer.implementation=foreach"]
_FINGERPRINTS = "--metrics.fingerprint_every=1"
_SMALL = ["--training.seq_len=64", "--training.local_batch_size=1", "--training.global_batch_size=24"]
BITWISE_RUNS: dict[str, tuple[int, list[str]]] = {
    "2 ranks": (2, []),
    "3 ranks": (3, []),
    "2 ranks, bitwise": (2, BITWISE),
    "3 ranks, bitwise": (3, BITWISE),
    "8 ranks, bitwise": (8, BITWISE),
}

ONE, OTHER_SEED = "one process", "one process, another seed"


def losses(folder: Path) -> list[float]:
    """Losses of a finished run, one a step."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]


def place_of(folder: Path, name: str) -> Path:
    """The folder of a run."""
    return folder / name.replace(" ", "_")


def flags(layout: dict[str, Any]) -> list[str]:
    """Command-line flags of options of ``parallelism``."""
    return [f"--parallelism.{key}={value}" for key, value in layout.items()]


def train(folder: Path, name: str, ranks: int, arguments: list[str], config: str = CONFIG) -> list[float]:
    """The losses of the run ``name``, which is in ``folder`` or is run there."""
    place = place_of(folder, name)
    if not (place / "done").exists():
        said = [f"--job.dump_folder={place}", "--metrics.log_freq=1", "--checkpoint.enable=false", *arguments]
        environment = os.environ | {"CONFIG_FILE": config, "NGPU": str(ranks)}
        subprocess.run(["./run_train.sh", *said], env=environment, check=True, stdout=subprocess.DEVNULL)
        (place / "done").touch()
        print(f"{name}: {losses(place)[-1]:.4f}", flush=True)
    return losses(place)


def first_difference(folder: Path, name: str) -> str:
    """The first step and quantity in which a run differs from that of one process."""
    first, other = (compare_runs.read_steps(place_of(folder, run)) for run in (ONE, name))
    for step in sorted(first):
        if lines := compare_runs.difference(first[step], other[step]):
            return f"step {step}, {lines[0]}"
    return f"none in {len(first)} steps"


def loads(folder: Path, name: str) -> list[float]:
    """The entropy of the loads of experts in each step of a run: another choice of any token changes it."""
    lines = (place_of(folder, name) / "metrics.jsonl").read_text().splitlines()
    return [record["moe/load_entropy"] for line in lines if "loss" in (record := json.loads(line))]


def choices(folder: Path, runs: dict[str, list[float]]) -> str:
    """The table of the steps at which other experts are chosen than in one process, in Markdown."""
    lines = [
        "",
        "| layout | first step with another load of experts | largest difference before | and from there |",
        "|---|---|---|---|",
    ]
    expected = loads(folder, ONE)
    for name in runs.keys() - {ONE}:
        apart, found = differences(runs[name], runs[ONE]), loads(folder, name)
        pairs = zip(found, expected, strict=True)
        first = next((step for step, (a, b) in enumerate(pairs) if abs(a - b) > 1e-12), len(found))
        before, after = (max(part, default=0.0) for part in (apart[:first], apart[first:]))
        lines.append(f"| {name} | {first + 1} | {before:.1e} | {after:.1e} |")
    return "\n".join([*lines[:3], *sorted(lines[3:])]) + "\n"


def report(runs: dict[str, list[float]], precision: str, command: str, machine: str, what: str) -> str:
    """The table in Markdown."""
    steps = len(runs[ONE])
    lines = [
        f"# One curve, {precision}",
        "",
        f"`{command}`: {steps} steps of {what}, compared with one process. {machine}",
        "",
        f"| layout | loss of step {steps} | relative difference there | largest of all steps |",
        "|---|---|---|---|",
    ]
    for name, run in runs.items():
        apart = differences(run, runs[ONE])
        lines.append(f"| {name} | {run[-1]:.6f} | {apart[-1]:.1e} | {max(apart):.1e} |")
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, list[float]], output: Path, title: str) -> None:
    """All curves over one another, and their differences from one process, into the PNG ``output``."""
    from toolkit.commands.plot import pyplot

    plt = pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 2))
    for number, (name, run) in enumerate(runs.items()):
        steps, color = range(1, len(run) + 1), f"C{number}"
        width, alpha = (4, 0.3) if name == ONE else (1, 1)
        above.plot(steps, run, color=color, linewidth=width, alpha=alpha)
        if name != ONE:
            below.plot(steps, [max(x, 1e-9) for x in differences(run, runs[ONE])], color=color, linewidth=1)
        above.plot([], [], color=color, linewidth=2, label=name)
    above.set(title=title, ylabel="loss, nats a token")
    below.set(xlabel="step", ylabel="relative difference (0 as 1e-9)", yscale="log")
    above.legend(fontsize=8, frameon=False)
    save(figure, output)


def save(figure: Any, output: Path) -> None:
    """Write a figure as a PNG, with a grid and without frames."""
    for cell in figure.axes:
        cell.grid(True, color="0.9")
        cell.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--layouts", choices=("mesh", "experts", "bitwise"), default="mesh")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "curves"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args()
    machine = describe()
    common = [f"--training.steps={options.steps}", f"--training.mixed_precision_param={options.precision}"]
    if options.precision == "float64":
        common += ["--training.dtype=float64", "--training.mixed_precision_reduce=float64"]
    config, what = CONFIG, f"{CONFIG} on eight ranks"
    layouts = {name: (8, flags(layout)) for name, layout in LAYOUTS.items()}
    if options.layouts == "experts":
        config, what = EXPERTS_CONFIG, f"{EXPERTS_CONFIG} on two and four ranks"
        layouts = {name: (ranks, flags(layout)) for name, (ranks, layout) in EXPERT_LAYOUTS.items()}
    one = common
    if options.layouts == "bitwise":
        what, layouts = f"{CONFIG} with `{' '.join(_SMALL)}`", BITWISE_RUNS
        common = [*common, *_SMALL, _FINGERPRINTS]
        one = [*common, *BITWISE]
    folder = (
        options.folder / f"{Path(config).stem}-{options.layouts}" / options.precision / str(options.steps)
    )
    runs = {ONE: train(folder, ONE, 1, one, config)}
    for name, (ranks, layout) in layouts.items():
        runs[name] = train(folder, name, ranks, [*common, *layout], config)
    if options.precision == "bfloat16" and options.layouts != "bitwise":
        runs[OTHER_SEED] = train(folder, OTHER_SEED, 1, [*common, "--debug.seed=1"], config)
    command = (
        f"python -m benchmarks.curves --steps {options.steps} --precision {options.precision} "
        f"--layouts {options.layouts}"
    )
    text = report(runs, options.precision, command, machine, what)
    if options.layouts == "experts":
        text += choices(folder, runs)
    if options.layouts == "bitwise":
        text += "\nFirst differences of fingerprints from one process:\n\n" + "".join(
            f"- {name}: {first_difference(folder, name)}\n" for name in layouts
        )
    print(text)
    if options.output:
        options.output.write_text(text)
    if options.plot:
        title = f"{options.steps} steps, {options.precision}: {len(layouts)} layouts, one process"
        draw(runs, options.plot, title)


if __name__ == "__main__":
    main()
