"""Check that a run on two nodes survives what happens to nodes: a table of faults at random moments.

    python -m benchmarks.nodes [--faults 50] [--folder FOLDER] [--output benchmarks/results/nodes.md]

``tests/launcher/node_faults.py`` says what the faults are and what must hold after each; the nodes are
namespaces of this machine, so the command needs root on Linux. Each kind comes equally often. Starts follow
one another in runs of many steps. What has been done is kept in FOLDER, and the command goes on from there.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.resumable import command_line, publish
from tests.launcher.node_faults import KINDS, STEPS, Fault, Outcome, start, unlike
from tests.nodes import cluster, losses, newest, why_not

NODES = 2


def report(starts: Sequence[dict[str, Any]], command: str, machine: str) -> str:
    """The table in Markdown."""
    hit = [one for one in starts if one["hit"]]
    problems = [problem for one in starts for problem in one["problems"]]
    lines = [
        "# Nodes",
        "",
        f"`{command}`: a run of {STEPS} steps on {NODES} nodes, which are namespaces of one machine with a "
        f"rank each, saves after each step; each start has a fault at a random moment. {machine}",
        "",
        "| fault | times | of them at most 15 s after the start | named everywhere after | all ended after |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [one for one in hit if one["fault"]["kind"] == kind]
        if of_kind:
            early = sum(one["fault"]["saves"] == 0 for one in of_kind)
            named, ended = ([one[what] for one in of_kind] for what in ("named", "ended"))
            lines.append(f"| {kind} | {len(of_kind)} | {early} | {_seconds(named)} | {_seconds(ended)} |")
    runs = max((one["run"] for one in starts), default=-1) + 1
    lines += [
        "",
        f"Seconds: the median and the longest. {len(hit)} faults in {runs} runs, each ended by the same "
        "command; a link that gets slow as its run ends is not counted. Not named within 60 s by each "
        "launcher that was left, another exit code than 1 (after a slow link, which is mended and the run "
        "stopped by SIGTERM: 0 or 75), a process left on a node, a committed step lost, not resumed from the "
        "newest one, or at the end another loss than in a run that was never disturbed: "
        f"{len(problems)}.",
        *(f"- {problem}" for problem in problems),
    ]
    return "\n".join(lines) + "\n"


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f}, {max(values):.1f}"


def main() -> None:
    parser = command_line(__doc__.partition("\n")[0], name="nodes")
    parser.add_argument("--faults", type=int, default=50)
    options = parser.parse_args()
    if why := why_not():
        sys.exit(why)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    machine, never, kept = describe(), folder / "never_disturbed", folder / "starts.jsonl"
    starts = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    with cluster(NODES, folder / "logs") as made:
        if newest(never) < STEPS:
            first = start(made, never, None)
            assert not first.problems, first.problems
        expected = losses(never)
        while True:
            run = max((one["run"] for one in starts), default=0)
            place = folder / f"run-{run}"
            if newest(place) >= STEPS:
                run += 1
                place = folder / f"run-{run}"
            done = sum(one["hit"] for one in starts)
            if done >= options.faults and not place.exists():
                break
            fault = Fault.at_random(KINDS[done % len(KINDS)], random.Random(len(starts)))
            outcome: Outcome = start(made, place, fault if done < options.faults else None)
            if newest(place) >= STEPS:
                outcome.problems += unlike(place, expected)
            starts.append({"run": run, **asdict(outcome)})
            with kept.open("a") as lines:
                lines.write(json.dumps(starts[-1]) + "\n")
            told = f"{outcome.fault}, " if outcome.hit else ""
            print(f"{done + outcome.hit} faults: run {run}, {told}step {outcome.after}, named in", end=" ")
            print(f"{outcome.named:.1f} s, {outcome.problems or 'as it must be'}", flush=True)
    publish(report(starts, f"python -m benchmarks.nodes --faults {options.faults}", machine), options.output)


if __name__ == "__main__":
    main()
