"""How long ``./run_train.sh`` takes to its first step, beside the least that torchrun can take.

    python benchmarks/startup.py [--ranks 2] [--repeats 5] [--output benchmarks/results/startup.md]
                                 [--table.key value …]

In turn, so that both see the same machine: (a) torchrun with as many ranks that import torch's FSDP, form a
process group and exit; (b) ``run_train.sh`` until ``metrics.jsonl`` has its first line, which comes when the
first step ends. One run before the first timing fills the token cache. Other arguments go to the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

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


def time_torchrun(ranks: int, folder: Path) -> float:
    """Seconds that torchrun takes for ranks that form a group and do nothing."""
    script = folder / "baseline.py"
    script.write_text(BASELINE)
    started = time.perf_counter()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            str(script),
        ],
        check=True,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return time.perf_counter() - started


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


def report(ranks: int, torchrun: Sequence[float], first: Sequence[float], steps: Sequence[float]) -> str:
    """The table of a benchmark, in Markdown; "above" is taken pair by pair."""
    above = [mine - theirs for mine, theirs in zip(first, torchrun, strict=True)]
    cores = len(os.sched_getaffinity(0))
    rows = [
        "# Start-up",
        "",
        f"`python benchmarks/startup.py --ranks {ranks} --repeats {len(first)}`: seconds, on {cores} cores "
        f"({platform.machine()}), Python {platform.python_version()}, token cache warm.",
        "",
        "| | median | least | most |",
        "|---|---|---|---|",
        _row(f"torchrun, {ranks} ranks that import FSDP, form a group and exit", torchrun),
        _row("run_train.sh to the end of its first step", first),
        _row("of that, the step itself", steps),
        _row("run_train.sh above torchrun, to the end of the first step", above),
        _row("the same, to its start", [a - step for a, step in zip(above, steps, strict=True)]),
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the table here as well")
    options, arguments = parser.parse_known_args()
    torchrun, first, steps = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        for repeat in range(options.repeats + 1):
            folder = Path(temporary) / str(repeat)
            folder.mkdir()
            theirs = time_torchrun(options.ranks, folder)
            mine, step = time_first_step(options.ranks, folder, arguments)
            if repeat:  # the first pair warms the caches of files and tokens
                torchrun.append(theirs)
                first.append(mine)
                steps.append(step)
                print(f"torchrun {theirs:.2f} s, first step {mine:.2f} s (the step {step:.2f} s)", flush=True)
    text = report(options.ranks, torchrun, first, steps)
    print("\n" + text)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
