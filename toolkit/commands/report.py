"""Write a report of a run into one self-contained HTML file: curves, time, ranks, events, config.

    llama-toolkit report outputs
    llama-toolkit report outputs -o report.html

The report is built from the files in the run's folder: metrics.jsonl (with metrics.save_for_all_ranks also
those of the other ranks, which are compared), heartbeat.json and config.toml. The run may still be running.
Needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from toolkit.commands.arguments import command_parser, local_path, output_file, writes
from toolkit.commands.plot import (
    COLORS,
    PANELS,
    Panel,
    Record,
    add_tips,
    curve,
    draw_curve,
    dress,
    panels_with_values,
    pyplot,
    read_run,
    step_before,
    write_html,
)
from toolkit.compat import tomllib
from toolkit.errors import EXIT_FINISHED, DataError
from toolkit.metrics.jsonl import rank_files

_CURVES = (
    *PANELS[:2],
    Panel("grad_norm", "Norm of the gradient", "before clipping"),
    Panel("lr", "Learning rate", ""),
    *PANELS[2:],
)
_PARTS = {"compute": "compute_seconds", "communication": "communication_seconds", "data": "data_seconds"}
_OTHER = "the rest of the step"
_RANKS = 64
"""Ranks that are drawn at most: the slowest of more."""


def read_ranks(folder: Path) -> dict[int, list[Record]]:
    """Read the records of each rank.

    Raises:
        DataError: the folder is not that of a run, or has no records yet.
    """
    ranks = {0: read_run(folder)}
    for rank, path in rank_files(folder).items():
        try:
            ranks[rank] = read_run(folder, path.name)
        except DataError:  # it has written no line yet
            continue
    return dict(sorted(ranks.items()))


def curve_figures(plt: Any, records: Sequence[Record]) -> list[Any]:
    """Plot logged values over the steps, with vertical lines at events."""
    figures = []
    for panel in panels_with_values(_CURVES, records):
        figure, cell = plt.subplots(figsize=(5.5, 2.9))
        points = curve(records, panel.key, "step")
        draw_curve(cell, panel, *points, COLORS[0])
        add_tips(cell, *points)
        for record in records:
            if "event" in record:
                cell.axvline(record["step"], color=COLORS[1], linewidth=0.8, alpha=0.6)
        dress(cell, panel, "step")
        figures.append(figure)
    return figures


def time_figures(plt: Any, records: Sequence[Record]) -> list[Any]:
    """Plot the parts of the step time, and the time between steps."""
    steps = [record for record in records if record.get("step_seconds") is not None]
    (first, left), (second, right) = plt.subplots(figsize=(6.5, 3)), plt.subplots(figsize=(4.5, 3))
    parts = {name: [record.get(key) or 0.0 for record in steps] for name, key in _PARTS.items()}
    known = [sum(of_step) for of_step in zip(*parts.values(), strict=True)]
    parts[_OTHER] = [max(0.0, it["step_seconds"] - its) for it, its in zip(steps, known, strict=True)]
    parts = {name: seconds for name, seconds in parts.items() if any(seconds)}
    places = [record["step"] for record in steps]
    left.stackplot(places, *parts.values(), labels=list(parts), colors=COLORS, alpha=0.8)
    left.set_title("Time of a step, rank 0", fontsize=11, loc="left")
    left.set_xlabel("step")
    left.set_ylabel("seconds")
    left.legend(loc="upper right", fontsize=8)
    left.margins(x=0)
    total = totals(records)
    right.barh(list(total), list(total.values()), color=COLORS[0], alpha=0.8)
    right.invert_yaxis()
    right.set_title("Where the time went", fontsize=11, loc="left")
    right.set_xlabel("seconds in all")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return [first, second]


def totals(records: Sequence[Record]) -> dict[str, float]:
    """Return the total seconds of the steps, and of everything between them."""
    total, before = {"training": 0.0}, step_before(records)
    for record in records:
        if record.get("step_seconds") is None:
            continue
        total["training"] += record["step_seconds"] * max(0, record["step"] - before)
        before = record["step"]
        for key, value in record.items():
            name = key.removesuffix("_seconds")
            between = name not in ("step", *_PARTS) and not name.endswith("_rank")
            if key != name and between and value:
                total[name] = total.get(name, 0.0) + value
    return total


def rank_figures(plt: Any, ranks: dict[int, list[Record]]) -> list[Any]:
    """Plot each rank's mean parts of the step time, and its memory."""
    means = {
        rank: {part: mean(records, key) for part, key in _PARTS.items()} for rank, records in ranks.items()
    }
    busy = {rank: of["compute"] + of["data"] for rank, of in means.items()}
    for rank, of in means.items():
        of[_OTHER] = max(0.0, mean(ranks[rank], "step_seconds") - sum(of.values()))
    shown = sorted(sorted(means, key=lambda rank: -busy[rank])[:_RANKS])
    height = 1.2 + 0.22 * len(shown)
    (first, left), (second, right) = plt.subplots(figsize=(7, height)), plt.subplots(figsize=(4, height))
    names = [f"rank {rank}" for rank in shown]
    begin = [0.0] * len(shown)
    for part, color in zip((*_PARTS, _OTHER), COLORS, strict=False):
        widths = [means[rank][part] for rank in shown]
        left.barh(names, widths, left=begin, color=color, alpha=0.8, label=part)
        begin = [start + width for start, width in zip(begin, widths, strict=True)]
    left.set_title("Time of a step of each rank, in the mean", fontsize=11, loc="left")
    left.set_xlabel("seconds")
    left.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    memory = [max((it.get("memory_gib") or 0.0 for it in ranks[rank]), default=0.0) for rank in shown]
    right.barh(names, memory, color=COLORS[2], alpha=0.8)
    right.set_title("Most memory", fontsize=11, loc="left")
    right.set_xlabel("GiB")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return [first, second]


def mean(records: Iterable[Record], key: str) -> float:
    """Return the mean of ``key`` without the first record, which includes warmup; 0 if it was not logged."""
    values = [record[key] for record in records if record.get(key) is not None]
    return fmean(values[1:] or values or [0.0])


def summary_lines(folder: Path, records: Sequence[Record]) -> list[str]:
    """Summarize the progress and results of the run."""
    steps = [record for record in records if record.get("loss") is not None]
    lines = [f"{folder.absolute()}, written {time.strftime('%Y-%m-%d %H:%M')}"]
    skipped = {record["step"] for record in records if record.get("event") == "SKIPPED"}
    trained = [record for record in steps if record["step"] not in skipped]
    if trained:
        last = steps[-1]
        lines.append(
            f"step {last['step']:,}{_of_steps(folder)}: loss {trained[-1]['loss']:.4f} "
            f"(at first {trained[0]['loss']:.4f}), {last.get('tokens', 0):,} tokens, "
            f"{mean(steps, 'tokens_per_second'):,.0f} tokens/s on average"
        )
    validation = [record for record in records if record.get("validation_loss") is not None]
    if validation:
        best = min(validation, key=lambda record: record["validation_loss"])
        lines.append(
            f"validation loss {validation[-1]['validation_loss']:.4f}, lowest {best['validation_loss']:.4f} "
            f"at step {best['step']:,}"
        )
    beat = _json(folder / "heartbeat.json")
    if isinstance(beat.get("time"), float | int):
        age = max(0.0, time.time() - beat["time"])
        lines.append(f"heartbeat: {beat.get('state')} at step {beat.get('step')}, {age:,.0f} s ago")
    return lines


def _of_steps(folder: Path) -> str:
    """Return " of N", with the number of steps of the run, if the config in its folder contains that."""
    with suppress(OSError, ValueError, KeyError):
        text = (folder / "config.toml").read_text(encoding="utf-8")
        return f" of {tomllib.loads(text)['training']['steps']:,}"
    return ""


def events_table(records: Sequence[Record]) -> str:
    events = [record for record in records if "event" in record]
    if not events:
        return "<h2>Events</h2><p>none</p>"
    rows = "".join(
        f"<tr><td>{event['step']}</td><td>{html.escape(str(event['event']))}</td>"
        f"<td>{html.escape(str(event.get('reason', '')))}</td></tr>"
        for event in events
    )
    return f"<h2>Events</h2><table><tr><th>step</th><th></th><th></th></tr>{rows}</table>"


def config_text(folder: Path) -> str:
    """Format the configuration as a collapsed section, if the folder has one."""
    try:
        text = (folder / "config.toml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f"<details><summary>config.toml</summary><pre>{html.escape(text)}</pre></details>"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_report(folder: Path, output: Path) -> None:
    """Write the report of the run in ``folder``.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: the folder is not that of a run, or has no values yet.
        OSError: ``output`` cannot be written.
    """
    ranks = read_ranks(folder)
    plt = pyplot()
    figures = curve_figures(plt, ranks[0])
    if any(record.get("step_seconds") is not None for record in ranks[0]):
        figures += time_figures(plt, ranks[0])
    if len(ranks) > 1:
        figures += rank_figures(plt, ranks)
    tables = [events_table(ranks[0]), config_text(folder)]
    name = folder.absolute().name
    write_html(output, f"Run {name}", summary_lines(folder, ranks[0]), figures, tables)
    plt.close("all")


def main(argv: Sequence[str]) -> int:
    parser = command_parser("report", __doc__)
    parser.add_argument("run", type=local_path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--output", type=output_file, help="file to write (default: RUN/report.html)")
    options = parser.parse_args(argv)
    output = options.output or options.run / "report.html"
    with writes("--output", output):
        write_report(options.run, output)
    print(output)
    return EXIT_FINISHED
