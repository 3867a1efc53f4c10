"""Draw the plan of a run: memory over a step, the pipeline schedule, and the mesh on its nodes.

    llama-toolkit draw-plan CONFIG --gpu h100 --gpus 64 -o plan.html
    llama-toolkit draw-plan CONFIG --gpu h100 --gpus 64 -o plan.png --training.seq_len 4096

An .html is one self-contained file, a .png the same figures. The layout is that of CONFIG; llama-toolkit plan
searches for a better one. Needs no GPU and no data, but matplotlib (extra `plot`). Other arguments are config
keys.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import preflight
from toolkit.commands.arguments import (
    add_custom_import,
    command_parser,
    local_path,
    output_file,
    ranks,
    writes,
)
from toolkit.commands.plot import pyplot, write_html
from toolkit.config import Config
from toolkit.hardware import Hardware
from toolkit.planner.machines import Machine, find_machine
from toolkit.preflight.planned_run import PlannedRun

if TYPE_CHECKING:
    from toolkit.parallel.dims import ParallelDims
    from toolkit.planner.allocations import StepMemory
    from toolkit.planner.time import StepTime

_GIB = 2**30
# Okabe and Ito's colors, as in llama-toolkit plot; stacked from persistent to temporary memory.
_PARTS = {
    "parameters": "#0072B2",
    "optimizer state": "#56B4E9",
    "gradients": "#009E73",
    "gathered parameters": "#E69F00",
    "reductions": "#F0E442",
    "activations": "#D55E00",
    "work of backward": "#CC79A7",
    "work of the update": "#999999",
}
_ACTIONS = {
    "F": ("#0072B2", "forward"),
    "B": ("#D55E00", "backward"),
    "I": ("#D55E00", "backward, inputs"),
    "W": ("#E69F00", "backward, weights"),
}
_NODES, _RANKS = 16, 32
"""Nodes, and ranks of a pipeline, that are drawn at most."""


def memory_figure(plt: Any, memory: StepMemory, capacity: float) -> Any:
    """Plot memory by purpose over a step, with a line at the GPU's capacity."""
    figure, axes = plt.subplots(figsize=(11, 4))
    sizes = [[parts.get(part, 0) / _GIB for _, parts in memory.curve] for part in _PARTS]
    others = [
        sum(size for part, size in parts.items() if part not in _PARTS) / _GIB for _, parts in memory.curve
    ]
    places = range(len(memory.curve))
    colors = [*_PARTS.values(), "0.8"]
    axes.stackplot(places, *sizes, others, labels=[*_PARTS, "others"], colors=colors, step="mid")
    moments = [moment for moment, _ in memory.curve]
    highest = max(places, key=lambda place: sum(memory.curve[place][1].values()))
    axes.annotate(
        f"{memory.peak / _GIB:.1f} GiB in {memory.moment}", (highest, memory.peak / _GIB), (0, 6),
        textcoords="offset points", ha="center", fontsize=9,
    )  # fmt: skip
    if memory.peak > capacity / 4:
        axes.axhline(capacity / _GIB, color="black", linestyle="--", linewidth=1)
    every = max(1, len(moments) // 24)
    axes.set_xticks(list(places)[::every], moments[::every], rotation=60, ha="right", fontsize=7)
    axes.set_ylim(0, 1.15 * max(memory.peak, capacity if memory.peak > capacity / 4 else 0) / _GIB)
    axes.set_ylabel("GiB")
    axes.set_title("Memory over a step, of the rank that takes most", loc="left", fontsize=11)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    axes.margins(x=0)
    return figure


def time_figure(plt: Any, time: StepTime) -> Any:
    """Plot the pipeline schedule, white where a rank waits; without a pipeline, the parts of a step."""
    if time.timeline is None:
        figure, axes = plt.subplots(figsize=(11, 1.8))
        parts = {"compute": time.compute, **{f"waits for {name}": it for name, it in time.exposed.items()}}
        begin = 0.0
        for (name, seconds), color in zip(
            (parts | {"optimizer": time.optimizer}).items(), _PARTS.values(), strict=False
        ):
            axes.broken_barh([(begin, seconds)], (0, 1), color=color, label=f"{name} {seconds:.3g} s")
            begin += seconds
        axes.set_yticks([])
        title = "Time of a step"
    else:
        actions = time.timeline.actions[:_RANKS]
        figure, axes = plt.subplots(figsize=(11, 1.2 + 0.35 * len(actions)))
        for kind, (color, name) in _ACTIONS.items():
            label = name
            for rank, done in enumerate(actions):
                bars = [(begin, end - begin) for (it, _, _), begin, end in done if it == kind]
                if bars:
                    axes.broken_barh(
                        bars, (rank - 0.45, 0.9), color=color, edgecolor="white", linewidth=0.3, label=label
                    )
                    label = ""
        axes.invert_yaxis()
        axes.set_yticks(range(len(actions)), [f"pp {rank}" for rank in range(len(actions))], fontsize=8)
        more = len(time.timeline.actions) - len(actions)
        title = f"The pipeline: {time.bubble / time.seconds:.0%} of the step a rank waits for others"
        title += f" ({more} more ranks are not drawn)" if more else ""
    axes.set_xlabel("seconds")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    axes.margins(x=0)
    return figure


def mesh_figure(plt: Any, layout: ParallelDims, node: int) -> Any:
    """Plot the GPUs of the first nodes with their mesh coordinates, colored by stage or replica."""
    from toolkit.planner.dry_run import coordinates

    nodes = -(-layout.world_size // node)
    shown = min(nodes, _NODES)
    figure, axes = plt.subplots(figsize=(max(4.0, 1.3 * node), 0.9 + 0.42 * shown))
    colors = plt.get_cmap("tab20").colors
    sizes = {name: getattr(layout, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    used = [name for name, size in sizes.items() if size > 1]
    for rank in range(min(layout.world_size, shown * node)):
        place = coordinates(layout, rank)
        color = colors[place[used[0]] % len(colors)] if used else colors[0]
        row, column = divmod(rank, node)
        axes.add_patch(plt.Rectangle((column, row), 0.94, 0.86, color=color, alpha=0.45, linewidth=0))
        where = " ".join(f"{name.replace('dp_', '')} {place[name]}" for name in used)
        axes.text(column + 0.47, row + 0.43, f"{rank}\n{where}", ha="center", va="center", fontsize=6)
    axes.set_xlim(0, node)
    axes.set_ylim(shown, 0)
    axes.set_xticks([])
    axes.set_yticks([row + 0.43 for row in range(shown)], [f"node {row}" for row in range(shown)], fontsize=7)
    axes.spines[:].set_visible(False)
    more = f", the first {shown} of {nodes} nodes" if nodes > shown else ""
    axes.set_title(f"{layout} on nodes of {node}{more}", loc="left", fontsize=11)
    return figure


def write_png(path: Path, plt: Any, figures: Sequence[Any]) -> None:
    """Write the figures into one image, below one another."""
    import numpy as np

    images = []
    for figure in figures:
        data = io.BytesIO()
        figure.savefig(data, dpi=110, format="png")
        data.seek(0)
        images.append(plt.imread(data)[:, :, :3])
    width = max(image.shape[1] for image in images)
    padded = [np.pad(it, ((0, 0), (0, width - it.shape[1]), (0, 0)), constant_values=1.0) for it in images]
    plt.imsave(path, np.concatenate(padded))


def _plan(run: PlannedRun, machine: Machine) -> tuple[StepMemory, StepTime]:
    from toolkit.distributed.process_group import DTYPES
    from toolkit.planner.fit import forecast
    from toolkit.planner.time import step_time

    assert run.model and run.mesh
    memory = forecast(run)
    return memory, step_time(run.config, run.model, run.mesh, machine, param_dtype=DTYPES[run.precision])


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = command_parser("draw-plan", __doc__, allow_abbrev=False)
    add_custom_import(parser)
    parser.add_argument("config", metavar="CONFIG", type=local_path, help="a TOML")
    parser.add_argument("--gpu", required=True, metavar="KIND", help="such as h100")
    parser.add_argument("--gpus", required=True, type=ranks, metavar="N", help="in all")
    parser.add_argument("-o", "--output", type=output_file, required=True, help="an .html or a .png")
    asked, words = parser.parse_known_args(argv)
    if asked.output.suffix not in (".html", ".png"):
        parser.error(f"-o {asked.output}: an .html or a .png is written")
    machine = find_machine(asked.gpu)
    hardware = Hardware("cuda", machine.name, machine.node, "bfloat16" in machine.peak, capability=9.0)

    def checked(config: Config) -> PlannedRun:
        from toolkit.planner.dry_run import required_rules

        run = PlannedRun(config, asked.gpus, hardware)
        preflight.raise_problems(config, world_size=asked.gpus, hardware=hardware, only=required_rules(run))
        return run

    run = checked(preflight.load(["--job.config_file", str(asked.config), *words], checked))
    plt = pyplot()
    memory, time = _plan(run, machine)
    assert run.mesh
    figures = [
        memory_figure(plt, memory, machine.memory),
        time_figure(plt, time),
        mesh_figure(plt, run.mesh, machine.node),
    ]
    lines = [
        f"{run.mesh} on {asked.gpus} {machine.name}",
        f"a step takes {time.seconds:.3g} s: {time.tokens_per_second / asked.gpus:,.0f} tokens/s per "
        f"GPU, {time.mfu:.1%} MFU",
        f"peak {memory.peak / _GIB:.1f} GiB of {machine.memory / _GIB:.0f}, in {memory.moment}",
    ]
    title = f"{asked.config.stem}: {run.model_label}"
    with writes("--output", asked.output):
        if asked.output.suffix == ".html":
            write_html(asked.output, title, lines, figures)
        else:
            write_png(asked.output, plt, figures)
    print("\n".join([*lines, str(asked.output)]))
    return 0
