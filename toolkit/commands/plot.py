"""Plot the curves of one or several runs into a PNG.

    llama-toolkit plot outputs
    llama-toolkit plot outputs/a outputs/b -o compare.png --x tokens

Draws one panel each for training loss, validation loss, memory and speed, if any run has it. Loss and speed
are light as logged and dark when smoothed. Runs are labeled by their folder. Needs matplotlib (extra `plot`).
"""

from __future__ import annotations

import html
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.commands.arguments import command_parser, local_path, output_file, writes
from toolkit.errors import EXIT_FINISHED, ConfigError, DataError, Problem, install_command

Record = dict[str, Any]
Points = tuple[list[float], list[float]]

# Okabe and Ito's colors, distinguishable with color blindness; their yellow is too light for lines.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SMOOTHED_OVER = 30
"""A curve is averaged over this part of its length."""
_TIPS, _TIP = 100, "tip "
"""Tooltips of a curve, at most, and what the ids of their points begin with."""


@dataclass(frozen=True)
class Panel:
    key: str
    title: str
    unit: str
    smooth: bool = False
    from_zero: bool = False


PANELS = (
    Panel("loss", "Training loss", "nats", smooth=True),
    Panel("validation_loss", "Validation loss", "nats"),
    Panel("memory_gib", "Memory of rank 0", "GiB", from_zero=True),
    Panel("tokens_per_second", "Speed of all ranks", "tokens/s", smooth=True, from_zero=True),
)
X_LABELS = {"step": "step", "tokens": "tokens", "hours": "hours of training, without saves and validation"}


def read_run(folder: Path, name: str = "metrics.jsonl") -> list[Record]:
    """Read the records of ``name`` in ``folder``.

    Raises:
        DataError: the file is missing or empty.
    """
    path = folder / name
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(
            f"{folder} is not the folder of a run: {path} cannot be read ({error.strerror})\n"
            "  fix:  give the job.dump_folder of the run (default: outputs)"
        ) from None
    records = list(_records(lines))
    if not records:
        raise DataError(f"{path} contains no step yet\n  fix:  wait for the first logged step of the run")
    return records


def _records(lines: Sequence[str]) -> Iterator[Record]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):  # else it is damaged
            yield record


def axis(records: Sequence[Record], x: str) -> list[float]:
    """Return the value of each record on the axis ``x``: its step, or the tokens or hours up to it."""
    if x == "step":
        return [record["step"] for record in records]
    values, tokens, seconds, before = [], 0.0, 0.0, step_before(records)
    for record in records:
        tokens = record.get("tokens", tokens)
        if record.get("step_seconds") is not None:
            seconds += record["step_seconds"] * (record["step"] - before)
            before = record["step"]
        values.append(tokens if x == "tokens" else seconds / 3600)
    return values


def step_before(records: Sequence[Record]) -> int:
    """Return the step before the first record: a run logs its first step after a start or resumption,
    regardless of ``metrics.log_freq``."""
    steps = [record["step"] for record in records if record.get("step_seconds") is not None]
    return steps[0] - 1 if steps else 0


def curve(records: Sequence[Record], key: str, x: str) -> Points:
    """Return the points of ``key``, from the records that have it."""
    points = [
        (place, record[key])
        for place, record in zip(axis(records, x), records, strict=True)
        if record.get(key) is not None
    ]
    return [place for place, _ in points], [value for _, value in points]


def panels_with_values(panels: Sequence[Panel], records: Sequence[Record]) -> list[Panel]:
    """Select the panels with a value in any record.

    Raises:
        DataError: there is none.
    """
    found = [panel for panel in panels if any(record.get(panel.key) is not None for record in records)]
    if not found:
        raise DataError("there is no number to draw yet\n  fix:  wait for the first step of a run")
    return found


def smooth(values: Sequence[float]) -> list[float]:
    """Average over a window around each value; at the ends, the window is narrower to avoid bias."""
    reach = len(values) // _SMOOTHED_OVER // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    result = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        result.append((sums[index + near + 1] - sums[index - near]) / (2 * near + 1))
    return result


def names(folders: Sequence[Path]) -> list[str]:
    """Label paths by the fewest trailing parts that make them unique."""
    paths = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, paths)) + 1):
        found = [os.path.join(*parts[-count:]) for parts in paths]
        if len(set(found)) == len(found):
            return found
    return [str(folder) for folder in folders]


def draw(runs: dict[str, list[Record]], output: Path, *, x: str) -> None:
    """Plot ``runs``, records by name, into the PNG ``output``."""
    plt = pyplot()
    panels = panels_with_values(PANELS, [record for records in runs.values() for record in records])
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(6 * columns, 3.6 * rows), sharex=True, squeeze=False)
    cells = list(grid.flat)
    for panel, cell in zip(panels, cells, strict=False):
        for number, records in enumerate(runs.values()):
            draw_curve(cell, panel, *curve(records, panel.key, x), COLORS[number % len(COLORS)])
        dress(cell, panel, x)
    for cell in cells[len(panels) :]:
        cell.remove()
    handles = [
        plt.Line2D([], [], color=COLORS[number % len(COLORS)], linewidth=2) for number in range(len(runs))
    ]
    figure.legend(handles, list(runs), loc="outside upper center", ncols=min(len(runs), 4), frameon=False)
    figure.savefig(output, dpi=130, format="png")
    plt.close(figure)


def draw_curve(cell: Any, panel: Panel, places: list[float], values: list[float], color: str) -> None:
    marker = "o" if len(values) < 20 else None
    if panel.smooth and len(values) >= 2 * _SMOOTHED_OVER:
        cell.plot(places, values, color=color, alpha=0.25, linewidth=0.8)
        values = smooth(values)
    cell.plot(places, values, color=color, linewidth=1.6, marker=marker, markersize=3.5)


def add_tips(cell: Any, places: Sequence[float], values: Sequence[float]) -> None:
    """Add tooltips with step and value for :func:`write_html`, to at most :data:`_TIPS` points of a curve."""
    for index in range(0, len(values), -(-len(values) // _TIPS) or 1):
        tip = f"{_TIP}step {places[index]:g}: {values[index]:.6g}"
        cell.scatter(places[index], values[index], s=80, alpha=0, gid=tip)


def dress(cell: Any, panel: Panel, x: str) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    cell.set_title(panel.title, fontsize=11, loc="left")
    cell.set_xlabel(X_LABELS[x])
    cell.set_ylabel(panel.unit)
    cell.grid(True, color="0.9", linewidth=0.8)
    cell.set_axisbelow(True)
    cell.tick_params(labelbottom=True)
    cell.spines[["top", "right"]].set_visible(False)
    cell.margins(x=0.02)
    if panel.from_zero:
        cell.set_ylim(0, 1.05 * cell.dataLim.ymax or 1)
    if x == "step":
        cell.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if x == "tokens":
        cell.xaxis.set_major_formatter(EngFormatter(sep=""))
    if panel.key == "tokens_per_second":
        cell.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def pyplot() -> Any:
    """Import matplotlib.pyplot for drawing into files.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        rule = "drawing needs matplotlib, which is not installed"
        raise ConfigError(Problem(rule, install_command("plot"))) from None
    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    plt.rcParams["figure.constrained_layout.use"] = True
    return plt


def write_html(
    path: Path, title: str, lines: Sequence[str], figures: Sequence[Any], tables: Sequence[str] = ()
) -> None:
    """Write the figures as SVG into one page, followed by ``tables`` in HTML."""
    drawn = []
    for figure in figures:
        text = io.StringIO()
        figure.savefig(text, format="svg")
        svg = text.getvalue()[text.getvalue().index("<svg") :]
        svg = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", svg)
        drawn.append(f'<div style="flex:1 1 {4 * figure.get_figwidth():.0f}em">{svg}</div>')
    style = (
        "body{font:15px system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em}"
        ".figures{display:flex;flex-wrap:wrap}.figures div{min-width:0}svg{width:100%;height:auto}"
        "p{overflow-wrap:anywhere}"
        "table{border-collapse:collapse}td,th{text-align:left;padding:.2em 1em .2em 0;vertical-align:top}"
        "pre{font-size:12px}"
    )
    body = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    body += f'<div class="figures">{"".join(drawn)}</div>{"".join(tables)}'
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{html.escape(title)}</title><style>{style}</style>"
    path.write_text(
        f"<!doctype html><html><head>{head}</head><body><h1>{html.escape(title)}</h1>{body}</body></html>\n",
        encoding="utf-8",
    )


def main(argv: Sequence[str]) -> int:
    parser = command_parser("plot", __doc__)
    parser.add_argument("runs", nargs="+", type=local_path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "-o", "--output", type=output_file, help="PNG to write (default: curves.png in the first run)"
    )
    parser.add_argument("--x", choices=list(X_LABELS), default="step")
    options = parser.parse_args(argv)
    output = options.output or options.runs[0] / "curves.png"
    runs = dict(zip(names(options.runs), map(read_run, options.runs), strict=True))
    with writes("--output", output):
        draw(runs, output, x=options.x)
    print(output)
    return EXIT_FINISHED
