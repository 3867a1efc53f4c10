"""Check that a run survives being killed: a table of many kills at random moments.

    python -m benchmarks.kills [--kills 200] [--storage] [--model experts] [--folder FOLDER]
                               [--output FILE.md]

``tests/checkpoint/kills.py`` says what a kill is and what must hold after it. Runs that are killed at most
ten times follow one another, saving in turn while training waits and in the background. What has been done
is kept in FOLDER, and the command goes on from there. With --storage the checkpoints are on an S3 server
(``tests/s3_server.py``), which at random moments is killed, or stalls, and is back after 6 seconds at most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from tests.checkpoint.kills import MODELS, RANKS, STEPS, TARGETS, chain, checkpoints_of, result, start
from tests.s3_server import Server, running
from toolkit.config.local_paths import expand_user

AT_MOST = 10
MODES = ("disabled", "async")


def report(starts: Sequence[dict[str, Any]], command: str, machine: str) -> str:
    """The table in Markdown."""
    killed = [one for one in starts if one["killed"]]
    problems = [problem for one in starts for problem in one["problems"]]
    lines = [
        "# Kills",
        "",
        f"`{command}`: a run of {STEPS} steps on {RANKS} ranks that saves after each, killed at random "
        f"moments until it comes to its end. {machine}",
        "",
        "| SIGKILL to | while saves are | kills | of them inside a save |",
        "|---|---|---|---|",
    ]
    kills = Counter((one["kill"]["target"], one["mode"]) for one in killed)
    inside = Counter((one["kill"]["target"], one["mode"]) for one in killed if one["unfinished_save"])
    for target in TARGETS:
        for mode in MODES:
            how = {"disabled": "waited for", "async": "in the background"}[mode]
            lines.append(f"| {target} | {how} | {kills[target, mode]} | {inside[target, mode]} |")
    lines += [
        "",
        f"{len(killed)} kills in {len({one['chain'] for one in starts})} runs. Not "
        "resumed from the newest committed step, a committed step lost, a file that is not what was saved, a "
        f"rank left running, or a loss, parameter or moment unlike the run that was never killed: "
        f"{len(problems)}.",
        *(f"- {problem}" for problem in problems),
        *_falls(starts),
    ]
    return "\n".join(lines) + "\n"


def _falls(starts: Sequence[dict[str, Any]]) -> list[str]:
    """Count the falls of the server, where there was one."""
    falls = Counter(how for one in starts for how in one.get("falls", ()))
    if not falls:
        return []
    told = f"{falls['killed']} times and stalled {falls['stalled']} times"
    return ["", f"Meanwhile the S3 server with the checkpoints was killed {told}, for 0.1 to 6 seconds each."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "kills"))
    parser.add_argument("--storage", action="store_true", help="checkpoints on an S3 server that falls")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    parser.add_argument("--model", choices=MODELS, default="dense", help="experts: with expert parallelism")
    options = parser.parse_args()
    folder: Path = options.folder / options.model
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe()
    never, kept = folder / "never_killed", folder / "starts.jsonl"
    if not (never / "done").exists():
        first = start(never, "disabled", None, model=options.model)
        assert not first.problems, first.problems
        (never / "done").touch()
    expected = result(never)
    starts = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    with running(folder / "store") if options.storage else nullcontext() as server:
        os.environ.update(server.environment if server else {})
        _kill_runs(options, folder, expected, starts, server)
    command = f"python -m benchmarks.kills --kills {options.kills}{' --storage' * options.storage}"
    if options.model != "dense":
        command += f" --model {options.model}"
    text = report(starts, command, machine)
    print(text)
    if options.output:
        options.output.write_text(text)


def _kill_runs(
    options: argparse.Namespace,
    folder: Path,
    expected: Mapping[str, str],
    starts: list[dict[str, Any]],
    server: Server | None,
) -> None:
    """Add to ``starts``, and to the file that keeps them, until there are enough kills."""
    kept = folder / "starts.jsonl"
    while (done := sum(one["killed"] for one in starts)) < options.kills:
        number = starts[-1]["chain"] + 1 if starts else 0
        mode, place = MODES[number % len(MODES)], folder / f"run-{number}"
        shutil.rmtree(place, ignore_errors=True)
        if server:
            expand_user(str(checkpoints_of(place, server))).remove_tree()  # type: ignore[attr-defined]
        at_most = min(AT_MOST, options.kills - done)
        outcomes = chain(place, mode, random.Random(number), at_most, expected, server, options.model)
        new = [{"chain": number, "mode": mode, **asdict(outcome)} for outcome in outcomes]
        with kept.open("a") as lines:
            lines.writelines(json.dumps(one) + "\n" for one in new)
        starts += new
        problems = [problem for outcome in outcomes for problem in outcome.problems]
        print(f"run {number}: {sum(one['killed'] for one in new)} kills, {problems or 'equal'}", flush=True)
        if not problems:
            shutil.rmtree(place)


if __name__ == "__main__":
    main()
