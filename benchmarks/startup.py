"""How long ``./run_train.sh`` takes to its first step, beside the least that torchrun can take.

    python -m benchmarks.startup [--ranks 2] [--repeats 5] [--output benchmarks/results/startup.md]
                                 [--table.key value …]

In turn, so that both see the same machine: (a) torchrun with as many ranks that import torch's FSDP, form a
process group and exit; (b) ``run_train.sh`` until ``metrics.jsonl`` has its first line, which comes when the
first step ends. One run before the first timing fills the token cache. Other arguments go to the run. Also
the processor time of the preflight, for a valid config and for one with mistakes, of the slowest ``--help``,
and of a search for layouts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from toolkit.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
BASELINE = """
import torch
import torch.distributed as dist
import torch.distributed.fsdp
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
dist.destroy_process_group()
"""
POLL_SECONDS = 0.005
LIMIT_SECONDS = 600.0
PREFLIGHT = ("preflight", "debug_model", "--world-size", "8")
PLAN = ("plan", "llama3_8b", "--gpu", "h100", "--gpus", "8")
MISTAKES = ("--training.steps=many", "--parallelism.tensor_parallel_degree=3", "--model.n_heads=5")
Timed = TypeVar("Timed")


def time_command(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(
        command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return time.perf_counter() - started


def processor_seconds(*words: str) -> float:
    """Processor seconds of a command of ``llama-toolkit``, which hardly depend on other work."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run([sys.executable, "-m", "toolkit", *words], cwd=ROOT, capture_output=True)
    return used() - before


def time_torchrun(ranks: int, *program: str) -> float:
    """Seconds that torchrun takes from its start to the end of ranks that run ``program``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return time_command(*command, *program)


def time_supervisor(ranks: int, *program: str) -> float:
    """The same for the toolkit's own launcher, without the check of a configuration."""
    code = (
        "import sys; from toolkit.launcher.supervise import supervise; "
        "from toolkit.launcher.supervisor import Launch; "
        f"sys.exit(supervise({program!r}, Launch(processes={ranks})))"
    )
    return time_command(sys.executable, "-c", code)


def time_first_step(ranks: int, folder: Path, arguments: Sequence[str]) -> tuple[float, float]:
    """Seconds from the start of ``run_train.sh`` to the end of its first step, and that step's own."""
    metrics = folder / "metrics.jsonl"
    command = [ROOT / "run_train.sh", "--job.dump_folder", folder, "--metrics.log_freq", "1", *arguments]
    started = time.perf_counter()
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"NGPU": str(ranks)},
        )
    while not (metrics.exists() and metrics.stat().st_size):
        seconds = time.perf_counter() - started
        if process.poll() is not None or seconds > LIMIT_SECONDS:
            process.kill()
            raise SystemExit(f"no step after {seconds:.0f} s:\n{(folder / 'output.txt').read_text()}")
        time.sleep(POLL_SECONDS)
    seconds = time.perf_counter() - started
    for number in (signal.SIGTERM, signal.SIGINT):  # stop, and do not wait for a save
        process.send_signal(number)
    process.wait()
    first = json.loads(metrics.read_text().splitlines()[0])
    return seconds, float(first["step_seconds"])


def _row(name: str, seconds: Sequence[float]) -> str:
    return f"| {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |"


def report(ranks: int, seconds: Mapping[str, Sequence[float]]) -> str:
    """The table of a benchmark, in Markdown; differences are taken pair by pair."""
    above = [mine - theirs for mine, theirs in zip(seconds["first step"], seconds["baseline"], strict=True)]
    to_start = [mine - step for mine, step in zip(above, seconds["step"], strict=True)]
    rows = [
        "# Start-up",
        "",
        f"`python -m benchmarks.startup --ranks {ranks} --repeats {len(above)}`: seconds, on "
        f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), Python {platform.python_version()}, "
        "token cache warm.",
        "",
        "| | median | least | most |",
        "|---|---|---|---|",
        _row(f"torchrun, {ranks} ranks that import FSDP, form a group and exit", seconds["baseline"]),
        _row("run_train.sh to the end of its first step", seconds["first step"]),
        _row("of that, the step itself", seconds["step"]),
        _row("run_train.sh above torchrun, to the end of the first step", above),
        _row("the same, to its start", to_start),
        _row(f"torchrun, {ranks} ranks that do nothing", seconds["torchrun"]),
        _row("the toolkit's launcher, the same", seconds["supervisor"]),
        _row("the preflight of debug_model, processor time", seconds["preflight"]),
        _row("the same, with three mistakes", seconds["mistakes"]),
        _row("the slowest --help of a command, processor time", seconds["help"]),
        _row(f"`llama-toolkit {' '.join(PLAN)}`, processor time", seconds["plan"]),
    ]
    return "\n".join(rows) + "\n"


def measure(ranks: int, repeats: int, arguments: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each thing timed, ``repeats`` times in turn, after one round that warms caches."""
    seconds: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary) / "baseline.py"
        script.write_text(BASELINE)
        for repeat in range(repeats + 1):
            folder = Path(temporary) / str(repeat)
            folder.mkdir()
            timed = {"baseline": time_torchrun(ranks, str(script))}
            timed["first step"], timed["step"] = time_first_step(ranks, folder, arguments)
            timed["torchrun"] = time_torchrun(ranks, "--no-python", "true")
            timed["supervisor"] = time_supervisor(ranks, "true")
            timed["preflight"] = processor_seconds(*PREFLIGHT)
            timed["mistakes"] = processor_seconds(*PREFLIGHT, *MISTAKES)
            timed["help"] = max(processor_seconds(name, "--help") for name in COMMANDS)
            timed["plan"] = processor_seconds(*PLAN)
            if repeat:
                for name, value in timed.items():
                    seconds[name].append(value)
                print(", ".join(f"{name} {value:.2f} s" for name, value in timed.items()), flush=True)
    return seconds


def main_of(
    description: str | None,
    measure: Callable[[int, int, Sequence[str]], Timed],
    report: Callable[[int, Timed], str],
    *,
    repeats: int,
) -> None:
    """The command line of a benchmark that repeats starts: measure, print the table, write it."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--output", type=Path, help="write the table here as well")
    options, arguments = parser.parse_known_args()
    text = report(options.ranks, measure(options.ranks, options.repeats, arguments))
    print("\n" + text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main_of(__doc__, measure, report, repeats=5)
