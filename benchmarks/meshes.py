"""Check that layouts of tests/meshes.py have the gradients of one process, and send what the planner says.

    python -m benchmarks.meshes [--part 1/3] [--folder FOLDER] [--output benchmarks/results/meshes.md]

Runs are kept in FOLDER as they end, and what is there is not run again: stop the command at any time and give
it once more, or give it in parts. The table is of all that FOLDER has.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.resumable import Kept, Results, command_line, part, publish
from tests import mesh_runs, meshes
from tests.helpers import run_world
from toolkit.hardware import cores

LIMIT_SECONDS = 180.0
"""For a layout, on a busy machine too: those of 32 ranks on two cores take most."""


def run_missing(results: Results, layouts: list[str]) -> None:
    """Run the layouts that have no result, and before them what they are compared with."""
    results.forget_failures()
    references = sorted({meshes.reference(layout) for layout in layouts})
    left = [layout for layout in references if not mesh_runs.recording(results.folder, layout).exists()]
    if left:
        run_world(mesh_runs.record, 1, str(results.folder), left, timeout=LIMIT_SECONDS * len(left))
    for ranks in sorted({meshes.ranks(layout) for layout in layouts}):
        mine = [layout for layout in layouts if meshes.ranks(layout) == ranks]
        results.run_missing(mine, mesh_runs.compare, ranks=ranks, limit_seconds=LIMIT_SECONDS)


def compare_sent(folder: Path, results: dict[str, Kept]) -> None:
    """Add to each result the bytes that the rank sends that sends most, as ``planned``, and whether what was
    counted is ``unplanned``."""
    done = [layout for layout, kept in results.items() if "failure" not in kept]
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        for layout, planned in zip(done, pool.map(mesh_runs.planned, repeat(folder), done), strict=True):
            kept = results[layout]
            kept["planned"] = max(sum(exchange.sent_bytes for exchange in rank) for rank in planned)
            expected = [mesh_runs.added_up(rank) for rank in planned]
            kept["unplanned"] = "compiled" not in layout.split() and kept["sent"] != expected


def report(results: dict[str, Kept], machine: str, command: str) -> str:
    """The table in Markdown, a line a layout, in the order of the list."""
    done = [results[layout] for layout in meshes.LAYOUTS if layout in results]
    failures = [f"- {kept['row']}: {said}" for kept in done if (said := _said(kept))]
    exact = [kept for kept in done if "failure" not in kept and meshes.precision(kept["row"]) == "float64"]
    minutes = sum(kept.get("seconds", 0) for kept in done) / 60
    lines = [
        "# Meshes",
        "",
        f"`{command}`: {len(done)} of {len(meshes.LAYOUTS)} layouts, each compared with one process on the "
        "same global batches of packed documents. Initial weights are the same bit for bit. Errors are "
        "relative: of every parameter's gradient (the largest difference over the parameter's largest "
        "gradient), of the loss and of the global gradient norm in the first step, and of every parameter "
        f"after {mesh_runs.STEPS} steps of AdamW with clipping. KB sent are those of a step, by the rank "
        "that sends most, if collectives go around rings, as the planner says; a layout whose count is not "
        "that to the byte has failed, but compiled ones are not counted. A line says what is not plain "
        f"(tests/meshes.py has the words); plain is fp64, held to {_limits('float64')}, float32 to "
        f"{_limits('float32')} and bfloat16 to {_limits('bfloat16')}. {machine} The runs took {minutes:.0f} "
        "minutes.",
        "",
        f"{len(failures)} failed{':' if failures else '.'}",
        *failures,
        "",
        "| layout | ranks | gradient | loss | norm | parameters | KB sent | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    if exact:
        worst = (f"{mesh_runs.largest(values):.1e}" for values in zip(*map(_errors, exact), strict=True))
        lines.append(f"| **the worst of all {len(exact)} in fp64** | | {' | '.join(worst)} | | |")
    return "\n".join([*lines, *map(_line, done)]) + "\n"


def _limits(precision: str) -> str:
    first, later = mesh_runs.LIMITS[precision]
    return f"{first:g} in the first step and {later:g} after it"


def _said(kept: Kept) -> str:
    """Problems of a layout, if it has any."""
    if "failure" in kept:
        return str(kept["failure"])
    problems = mesh_runs.problems(kept["row"], kept)[:3]
    return "; ".join([*problems, "sends something else than planned"] if kept["unplanned"] else problems)


def _errors(kept: Kept) -> tuple[float, float, float, float]:
    """Errors of gradients, loss and norm in the first step, and of the parameters after the last."""
    gradients, parameters = (mesh_runs.largest(kept[of].values()) for of in ("gradients", "parameters"))
    return gradients, kept["losses"][0], kept["norms"][0], parameters


def _line(kept: Kept) -> str:
    layout = kept["row"]
    errors = ["", "", "", ""] if "failure" in kept else [f"{value:.1e}" for value in _errors(kept)]
    seconds = f"{kept['seconds']:.0f}" if "seconds" in kept else ""
    sent = f"{kept['planned'] / 1000:,.0f}" if "planned" in kept else ""
    return f"| {layout} | {meshes.ranks(layout)} | {' | '.join(errors)} | {sent} | {seconds} |"


def main() -> None:
    options = command_line(__doc__.partition("\n")[0], name="meshes").parse_args()
    machine = describe()
    results = Results(options.folder, str, meshes.LAYOUTS.__contains__)
    run_missing(results, part(meshes.LAYOUTS, options.part))
    all_results = results.all()
    compare_sent(results.folder, all_results)
    publish(report(all_results, machine, "python -m benchmarks.meshes"), options.output)


if __name__ == "__main__":
    main()
