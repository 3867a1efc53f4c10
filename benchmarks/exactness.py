"""Whether every layout gives the run of one process: 20 steps in fp32 of each combination of techniques.

    python -m benchmarks.exactness [--whole] [--ranks 1 2 4] [--part 1/3] [--folder FOLDER]
                                   [--output benchmarks/results/exactness.md]

tests/layouts.py has the techniques; the tests try each pair of them, and this their products: strategy x
reshard x ranks x accumulation x checkpointing x wrap, all eager, and strategy x ranks x checkpointing x
compile; with ``--whole`` all of these and prefetch. Factors that are not crossed take turns through their
levels. Runs are kept in FOLDER as they end, and what is there is not run again: stop the command at any time
and give it once more, or give it in parts. The table is of all that FOLDER has.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from tests import layouts
from tests.helpers import run_world

RELATIVE = 1e-5
CHUNK = 20
"""Rows that a world runs: each leaves process groups behind, with their threads and sockets."""
LIMIT_SECONDS = 120.0
"""For a row, on a busy machine too."""
EAGER = ("strategy", "reshard", "ranks", "accumulation", "checkpointing", "compile", "wrap")


def planned(whole: bool) -> list[layouts.Row]:
    """The rows of the products, after the references; no row twice."""
    if whole:
        rows = list(layouts.every((*EAGER, "prefetch")))
    else:
        eager = layouts.every(EAGER)
        compiled = layouts.every(("strategy", "ranks", "checkpointing", "compile"))
        rows = [row for row in eager if row["compile"] == "off"]
        rows += [row for row in compiled if row["compile"] != "off"]
    return list({layouts.name(row): row for row in layouts.references() + rows}.values())


def run_into(folder: str, rows: Sequence[layouts.Row]) -> None:
    """Run each row in this rank's world; rank 0 adds a line to the results as soon as it ends."""
    import torch.distributed as dist

    from tests.curves import train

    for row in rows:
        started = time.perf_counter()
        run = train(folder, row)
        if dist.get_rank() == 0:
            keep(Path(folder), row, {"seconds": time.perf_counter() - started, "run": run})


def keep(folder: Path, row: layouts.Row, result: dict[str, Any]) -> None:
    with (folder / "runs.jsonl").open("a") as lines:
        lines.write(json.dumps({"row": row, **result}) + "\n")


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """What the folder has, by the name of the row; rows of other factors than today's are left out."""
    file = folder / "runs.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    results = []
    for line in lines:
        try:
            results.append(json.loads(line))
        except json.JSONDecodeError:  # cut off when the command was killed
            continue
    today = [result for result in results if layouts.exists(result["row"])]
    return {layouts.name(result["row"]): result for result in today}


def forget_failures(folder: Path) -> None:
    """Have what failed run again."""
    whole = [result for result in kept(folder).values() if "run" in result]
    (folder / "runs.jsonl").write_text("".join(json.dumps(result) + "\n" for result in whole))


def run_missing(folder: Path, rows: Sequence[layouts.Row]) -> None:
    """Run the rows that the folder does not have; one that fails is kept as that, and the rest go on."""
    forget_failures(folder)
    done = kept(folder)
    for ranks in sorted(layouts.FACTORS["ranks"]):  # what is compared with has one
        left = [row for row in rows if row["ranks"] == ranks and layouts.name(row) not in done]
        while left:
            chunk = left[:CHUNK]
            try:
                run_world(run_into, int(ranks), str(folder), chunk, timeout=LIMIT_SECONDS * len(chunk))
            except (RuntimeError, TimeoutError) as error:
                done = kept(folder)
                culprit = next((row for row in chunk if layouts.name(row) not in done), chunk[-1])
                keep(folder, culprit, {"failure": str(error).strip().splitlines()[-1]})
            done = kept(folder)
            left = [row for row in left if layouts.name(row) not in done]
            print(f"{ranks} ranks: {len(left)} left", flush=True)


def judge(result: dict[str, Any], reference: dict[str, Any]) -> tuple[float, float, str]:
    """Worst relative difference of the losses and of the norms, and what is wrong, if anything."""
    from tests.curves import differences

    for asked, who in ((result, ""), (reference, "what it is compared with: ")):
        if "failure" in asked:
            return math.nan, math.nan, who + asked["failure"]
    run, expected = result["run"], reference["run"]
    wrong = [f"other {what}" for what in ("weights", "samples") if run[what] != expected[what]]
    worst = []
    for what in ("losses", "norms"):
        apart = differences(run[what], expected[what])
        wrong += [] if all(difference <= RELATIVE for difference in apart) else [f"other {what}"]
        worst.append(max(apart))
    return worst[0], worst[1], ", ".join(wrong)


def report(results: dict[str, dict[str, Any]], machine: str, command: str) -> str:
    """The table in Markdown: the worst of each level of each factor."""
    judged = {
        name: judge(result, results[layouts.name(layouts.reference_row(result["row"]))])
        for name, result in results.items()
        if result["row"] not in layouts.references()
    }
    failures = [f"- {name}: {wrong}" for name, (_, _, wrong) in judged.items() if wrong]
    seconds = sum(result.get("seconds", 0) for result in results.values())
    lines = [
        "# Exactness",
        "",
        f"`{command}`: {len(judged):,} layouts, each 20 steps in fp32 with the same initial weights, bit for "
        "bit, and the same samples as one process without any technique, and its losses and gradient norms "
        f"within {RELATIVE:g} relative; the script says which combinations they are. {machine} The runs took "
        f"{seconds / 60:.0f} minutes.",
        "",
        f"{len(failures)} failed{':' if failures else '.'}",
        *failures,
        "",
        "The largest relative differences from one process, over all steps and layouts of a level:",
        "",
        "| factor | level | layouts | loss | gradient norm |",
        "|---|---|---|---|---|",
    ]
    lines += [_line("all", "", judged.values())]
    for factor, levels in layouts.FACTORS.items():
        for level in levels:
            mine = [judged[name] for name in judged if results[name]["row"][factor] == level]
            lines.append(_line(factor, level, mine))
    return "\n".join(lines) + "\n"


def _line(factor: str, level: str, judged: Iterable[tuple[float, float, str]]) -> str:
    judged = list(judged)
    measured = [(loss, norm) for loss, norm, _ in judged if not math.isnan(loss)]
    loss, norm = (f"{max(values):.1e}" for values in zip(*measured, strict=True)) if measured else ("", "")
    return f"| {factor} | {level} | {len(judged):,} | {loss} | {norm} |"


def _part(rows: list[layouts.Row], part: str) -> list[layouts.Row]:
    """The i-th of n equal parts; each has the references."""
    index, _, count = part.partition("/")
    references = layouts.references()
    others = [row for row in rows if row not in references]
    return references + others[int(index) - 1 :: int(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--whole", action="store_true", help="cross compile, wrap and prefetch, too")
    parser.add_argument("--ranks", nargs="+", choices=list(layouts.FACTORS["ranks"]), help="only these")
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "exactness"))
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    # A stop reaches the ranks through the clean-up of run_world.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.folder.mkdir(parents=True, exist_ok=True)
    machine = describe()
    rows = _part(planned(options.whole), options.part)
    if options.ranks:
        rows = [row for row in rows if row["ranks"] in options.ranks or row in layouts.references()]
    run_missing(options.folder, rows)
    command = "python -m benchmarks.exactness" + (" --whole" if options.whole else "")
    text = report(kept(options.folder), machine, command)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
