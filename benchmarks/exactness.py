"""Check that every layout gives the run of one process: 20 steps in fp32 of each combination of techniques.

    python -m benchmarks.exactness [--whole] [--ranks 1 2 4] [--part 1/3] [--folder FOLDER]
                                   [--output benchmarks/results/exactness.md]

tests/layouts.py has the techniques; the tests try each pair of them, and this their products: strategy x
reshard x ranks x accumulation x checkpointing x wrap, all eager, and strategy x ranks x checkpointing x
compile; with ``--whole`` all of these and prefetch. Factors that are not crossed take turns through their
levels. Runs are kept in FOLDER as they end, and what is there is not run again: stop the command at any time
and give it once more, or give it in parts. The table is of all that FOLDER has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from benchmarks.machine import describe
from benchmarks.resumable import Kept, Results, command_line, part, publish
from tests import layouts

RELATIVE = 1e-5
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


def run(folder: str, row: layouts.Row) -> dict[str, Any]:
    """Train by one row, in the world that is there."""
    from tests.curves import train

    return {"run": train(folder, row)}


def run_missing(results: Results, rows: list[layouts.Row]) -> None:
    """Run the rows that have no result."""
    results.forget_failures()
    for ranks in sorted(layouts.FACTORS["ranks"]):  # what is compared with has one
        mine = [row for row in rows if row["ranks"] == ranks]
        results.run_missing(mine, run, ranks=int(ranks), limit_seconds=LIMIT_SECONDS)


def judge(result: Kept, reference: Kept) -> tuple[float, float, str]:
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


def report(results: dict[str, Kept], machine: str, command: str) -> str:
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


def _part(rows: list[layouts.Row], which: str) -> list[layouts.Row]:
    """The i-th of n equal parts; each has the references."""
    references = layouts.references()
    return references + part([row for row in rows if row not in references], which)


def main() -> None:
    parser = command_line(__doc__.partition("\n")[0], name="exactness")
    parser.add_argument("--whole", action="store_true", help="cross compile, wrap and prefetch, too")
    parser.add_argument("--ranks", nargs="+", choices=list(layouts.FACTORS["ranks"]), help="only these")
    options = parser.parse_args()
    machine = describe()
    rows = _part(planned(options.whole), options.part)
    if options.ranks:
        rows = [row for row in rows if row["ranks"] in options.ranks or row in layouts.references()]
    results = Results(options.folder, layouts.name, layouts.exists)
    run_missing(results, rows)
    command = "python -m benchmarks.exactness" + (" --whole" if options.whole else "")
    publish(report(results.all(), machine, command), options.output)


if __name__ == "__main__":
    main()
