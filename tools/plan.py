"""Rank the layouts of GPUs that need not be here for training a model: memory, time, cost, and the reasons.

    python -m tools.plan CONFIG --gpu h100 --gpus 512
    python -m tools.plan CONFIG --gpu h100 --gpus 512 --tokens 15e12 --price 2.5 --write planned.toml
    python -m tools.plan CONFIG --gpu a100-80 --gpus 8 --explain --training.seq_len 4096

Degrees of the mesh, micro-batch, activation checkpointing and a pipeline's schedule are tried; global batch
and length of a sample stay CONFIG's. Neither GPUs nor data are needed. Words that are none of the options
below are keys of the config. docs/planning.md says what is reckoned and what is assumed.
Exit codes: 0 a layout was found, 2 the arguments or a model that fits on none, 3 a tokenizer that cannot be
read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.config import Config, load_config
from toolkit.config.types import MAX_RANKS
from toolkit.config.values import format_toml
from toolkit.errors import EXIT_FINISHED, ConfigError, DataError, Problem, ToolkitError, report
from toolkit.hardware import Hardware
from toolkit.io import standard_streams
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import needs_tokenizer
from toolkit.models.parameters import parameter_count
from toolkit.planner.machines import Machine, machine_named
from toolkit.planner.ranking_text import explained, gib, head, losers, table
from toolkit.preflight.planned_run import PlannedRun
from tools.arguments import add_custom_import, local_path, ranks

if TYPE_CHECKING:
    from toolkit.planner.search import Candidate, Found, Loser

_FAR = 33
"""Numbers of GPUs, more and less, among which one that works is looked for."""

_EVERY = 5.0
"""Seconds between lines of progress."""
_GIB = 2**30


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_custom_import(parser)
    add("config", metavar="CONFIG", type=local_path, help="a TOML")
    add("--gpu", required=True, metavar="KIND", help="as in toolkit/planner/machines.toml, such as h100")
    add("--gpus", required=True, type=ranks, metavar="N", help="in all")
    add("--gpus-per-node", type=ranks, metavar="N", help="default: the kind's")
    add("--memory", type=_positive, metavar="GIB", help="of one GPU; default: the kind's")
    add("--tokens", type=_positive, metavar="N", help="of the whole training, such as 15e12: days, GPU-hours")
    add("--price", type=_positive, metavar="P", help="of a GPU-hour; with --tokens: the cost")
    add("--top", type=ranks, default=10, metavar="N", help="layouts to show (default: 10)")
    add("--explain", action="store_true", help="print the arithmetic of the first")
    add("--write", type=local_path, metavar="FILE", help="a TOML that extends CONFIG with the first layout")
    add("--debug", action="store_true", help="show tracebacks")
    return parser


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, such as 2.5 or 15e12, not {text!r}")
    return number


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for and return the exit code."""
    parser = _parser()
    asked, words = parser.parse_known_args(argv)
    if asked.price and not asked.tokens:
        parser.error("--price needs --tokens, of which it is the cost")
    try:
        machine = machine_named(asked.gpu)
        memory = asked.memory * _GIB if asked.memory else machine.memory
        machine = replace(machine, node=asked.gpus_per_node or machine.node, memory=memory)
        config = load_config(["--job.config_file", str(asked.config), *words])
        if asked.write:
            _refuse(asked.write, asked.config, words)
        progress = _Progress()
        progress(f"looking for layouts of {asked.config} on {asked.gpus} {machine.name}")
        args = _model(config, machine, asked.gpus)
        found = _search(config, args, asked.gpus, machine, asked.top, progress)
        lines = [head(args, asked.gpus, machine, found), ""]
        lines += table(found, asked.gpus, asked.tokens, asked.price)
        lines += ["", *losers(found)]
        if asked.explain:
            lines += ["", *explained(found, args, machine)]
        print("\n".join(lines))
        if asked.write:
            _write(asked.write, asked.config, config, found.ranked[0])
            print(f"\nwritten to {asked.write}")
    except ToolkitError as error:
        return report(error, show=True, debug=asked.debug)
    return EXIT_FINISHED


def _model(config: Config, machine: Machine, world: int) -> ModelArgs:
    from toolkit.models.from_config import model_args

    run = PlannedRun(config, world, Hardware("cuda", machine.name, machine.node, True, 9.0))
    if needs_tokenizer(config) and run.vocabulary is None:
        raise DataError(run.tokenizer_error)
    return model_args(config, tokenizer_vocab=run.vocabulary)


class _Progress:
    """Prints to stderr what is being done: the first line at once, then one every :data:`_EVERY` seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, text: str) -> None:
        if (now := time.monotonic()) >= self._next:
            print(f"plan: {text}", file=sys.stderr, flush=True)
            self._next = now + _EVERY


def _search(
    config: Config, args: ModelArgs, world: int, machine: Machine, top: int, progress: _Progress
) -> Found:
    """The layouts, of which there is one at least.

    Raises:
        ConfigError: there is none; the message names a number of GPUs that works.
    """
    import torch

    from toolkit.planner.costs import refuse_unlike_blocks
    from toolkit.planner.search import fits, search

    asked = config.training.mixed_precision_param
    name = asked if asked != "auto" else "bfloat16" if "bfloat16" in machine.peak else "float32"
    if name not in machine.peak:
        rule = f"{machine.name} does not multiply {name}, only {', '.join(machine.peak)}"
        fix = "name another GPU, or another of these"
        raise ConfigError(Problem(rule, fix, "training.mixed_precision_param", asked))
    dtype = getattr(torch, name)
    refuse_unlike_blocks(args, config.finetune)
    refused: Problem | None = None
    lost: Loser | None = None
    try:
        found = search(config, args, world, machine, param_dtype=dtype, top=top, progress=progress)
    except ConfigError as error:
        refused = error.problems[0]
    else:
        if found.ranked:
            return found
        lost = found.losers.get("fit")
    if lost is not None:  # the more the better
        size = f"weights, gradients and optimizer state alone are {gib(found.states / world)}"
        size = f"the least takes {gib(lost.best.bytes)}" if lost.best else size
        rule = f"{parameter_count(args):,} parameters do not fit on {world} {machine.name}: {size} a GPU, of "
        rule += f"{gib(found.room)} that tensors may take"
        others = [world << more for more in range(1, MAX_RANKS.bit_length()) if world << more <= MAX_RANKS]
    else:
        rule = f"no mesh of so many divides the global batch of {config.training.global_batch_size}"
        rule = f"the preflight refuses each layout: {refused.key}: {refused.rule}" if refused else rule
        near = (world + step * sign for step in range(1, _FAR) for sign in (-1, 1))
        others = [other for other in near if other >= 1]
    nearest = None
    for other in others:
        progress(f"the model fits on none; trying {other} {machine.name}")
        if fits(config, args, other, machine, dtype):
            nearest = other
            break
    if nearest is None and refused:
        raise ConfigError(refused)
    fix = f"it does on {nearest} {machine.name}" if nearest else "take GPUs with more memory"
    raise ConfigError(Problem(rule, fix, "--gpus", world))


def _refuse(path: Path, extended: Path, words: Sequence[str]) -> None:
    """Raise what is wrong with a file to write before a layout is searched."""
    rule = ""
    if words:
        rule = f"{' '.join(words)} would be lost in a file that extends {extended}"
        fix = "put these keys into a TOML and plan that"
    elif path.exists():
        rule, fix = "is there already", "name another file, or remove it"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        rule, fix = f"{path.parent} is no folder that can be written to", "name a file that can be written"
    if rule:
        raise ConfigError(Problem(rule, fix, "--write", str(path)))


def _write(path: Path, extended: Path, config: Config, best: Candidate) -> None:
    relative = os.path.relpath(extended, path.parent)
    tables: dict[str, list[str]] = {}
    for key, value in best.settings.items():
        if value != config.value(key):
            of, _, name = key.rpartition(".")
            tables.setdefault(of, []).append(f"{name} = {format_toml(value)}")
    lines = [f"# {best.layout}, by tools.plan", "", f"extends = {format_toml(relative)}"]
    for of, settings in tables.items():
        lines += ["", f"[{of}]", *settings]
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError(Problem(rule, "name a file that can", "--write", str(path))) from None


if __name__ == "__main__":
    standard_streams.protect(end_with_reader=True)
    sys.exit(standard_streams.exit_code(main(sys.argv[1:])))
