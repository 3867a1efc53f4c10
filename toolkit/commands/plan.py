"""Search for the fastest layouts to train a model on GPUs: memory, step time, cost and reasons.

    llama-toolkit plan CONFIG --gpu h100 --gpus 512
    llama-toolkit plan CONFIG --gpu h100 --gpus 512 --tokens 15e12 --price 2.5 --write planned.toml
    llama-toolkit plan CONFIG --gpu a100-80 --gpus 8 --explain --training.seq_len 4096

Searches mesh degrees, micro-batch size, activation checkpointing and pipeline schedule; global batch and
sequence length are those of CONFIG. Needs no GPUs and no data. Other arguments are config keys.
docs/planning.md describes the estimates and assumptions. Exit codes: 0 a layout was found, 2 invalid
arguments or no layout fits, 3 unreadable tokenizer.
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

from toolkit.commands.arguments import add_custom_import, command_parser, local_path, ranks, writes
from toolkit.config import Config, load_config
from toolkit.config.types import MAX_RANKS
from toolkit.config.values import format_toml
from toolkit.errors import EXIT_FINISHED, ConfigError, DataError, Problem
from toolkit.hardware import Hardware
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import needs_tokenizer
from toolkit.models.parameters import parameter_count
from toolkit.planner.machines import Machine, find_machine
from toolkit.preflight.planned_run import PlannedRun

if TYPE_CHECKING:
    from toolkit.planner.search import Candidate, RejectedLayouts, SearchResult

_SEARCH_RANGE = 33
"""Range of larger and smaller numbers of GPUs in which to search for one that works."""

_INTERVAL = 2.0
"""Seconds between lines of progress."""
_GIB = 2**30


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plan", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add_custom_import(parser)
    add("config", metavar="CONFIG", type=local_path, help="a TOML file or a preset")
    add("--gpu", required=True, metavar="KIND", help="as in toolkit/planner/machines.toml, such as h100")
    add("--gpus", required=True, type=ranks, metavar="N", help="in all")
    add("--gpus-per-node", type=ranks, metavar="N", help="default: the kind's")
    add("--memory", type=_positive, metavar="GIB", help="of one GPU; default: the kind's")
    add("--tokens", type=_positive, metavar="N", help="of the whole training, such as 15e12: days, GPU-hours")
    add("--price", type=_positive, metavar="P", help="of a GPU-hour; with --tokens: the cost")
    add("--top", type=ranks, default=10, metavar="N", help="layouts to show (default: 10)")
    add("--explain", action="store_true", help="print the arithmetic of the first")
    add("--write", type=local_path, metavar="FILE", help="a TOML that extends CONFIG with the first layout")
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
    """Run the program with ``argv`` and return the exit code."""
    parser = _parser()
    asked, words = parser.parse_known_args(argv)
    if asked.price and not asked.tokens:
        parser.error("--price needs --tokens, to compute the cost")
    machine = find_machine(asked.gpu)
    memory = asked.memory * _GIB if asked.memory else machine.memory
    machine = replace(machine, node=asked.gpus_per_node or machine.node, memory=memory)
    config = load_config(["--job.config_file", str(asked.config), *words])
    if asked.write:
        _check_writable(asked.write, asked.config, words)
    progress = _Progress()
    progress(f"searching layouts of {asked.config} on {asked.gpus} {machine.name}")
    args = _model(config, machine, asked.gpus)
    from toolkit.planner import ranking_text as text  # with torch, which help and checks do not need

    result = _search(config, args, asked.gpus, machine, asked.top, progress)
    lines = [text.headline(args, asked.gpus, machine, result), ""]
    lines += text.table_lines(result, asked.gpus, asked.tokens, asked.price)
    lines += ["", *text.rejected_lines(result)]
    if asked.explain:
        lines += ["", *text.breakdown_lines(result, args, machine)]
    print("\n".join(lines))
    if asked.write:
        _write(asked.write, asked.config, config, result.ranked[0])
        print(f"\nwritten to {asked.write}")
    return EXIT_FINISHED


def _model(config: Config, machine: Machine, world: int) -> ModelArgs:
    from toolkit.models.from_config import model_args

    run = PlannedRun(config, world, Hardware("cuda", machine.name, machine.node, True, 9.0))
    if needs_tokenizer(config) and run.vocabulary is None:
        raise DataError(run.tokenizer_error)
    return model_args(config, tokenizer_vocab=run.vocabulary)


class _Progress:
    """Prints progress to stderr: the first line at once, then one every :data:`_INTERVAL` seconds."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, text: str) -> None:
        if (now := time.monotonic()) >= self._next:
            print(f"plan: {text}", file=sys.stderr, flush=True)
            self._next = now + _INTERVAL


def _search(
    config: Config, args: ModelArgs, world: int, machine: Machine, top: int, progress: _Progress
) -> SearchResult:
    """Search for layouts; returns at least one.

    Raises:
        ConfigError: there is none; the message gives a number of GPUs that works.
    """
    import torch

    from toolkit.planner.costs import check_uniform_blocks
    from toolkit.planner.ranking_text import gib
    from toolkit.planner.search import fits, search

    asked = config.training.mixed_precision_param
    name = asked if asked != "auto" else "bfloat16" if "bfloat16" in machine.peak else "float32"
    if name not in machine.peak:
        rule = f"{machine.name} does not support {name}, only {', '.join(machine.peak)}"
        fix = "choose another GPU, or one of these dtypes"
        raise ConfigError(Problem(rule, fix, "training.mixed_precision_param", asked))
    dtype = getattr(torch, name)
    check_uniform_blocks(args, config.finetune)
    rejected: Problem | None = None
    lost: RejectedLayouts | None = None
    try:
        result = search(config, args, world, machine, param_dtype=dtype, top=top, progress=progress)
    except ConfigError as error:
        rejected = error.problems[0]
    else:
        if result.ranked:
            return result
        lost = result.rejected.get("fit")
    if lost is not None:  # more GPUs may help
        size = f"weights, gradients and optimizer state alone are {gib(result.states / world)}"
        size = f"the smallest needs {gib(lost.best.bytes)}" if lost.best else size
        rule = (
            f"{parameter_count(args):,} parameters do not fit on {world} {machine.name}: {size} per GPU, of "
        )
        rule += f"{gib(result.capacity)} usable for tensors"
        others = [world << more for more in range(1, MAX_RANKS.bit_length()) if world << more <= MAX_RANKS]
    else:
        rule = f"no mesh of {world} GPUs divides the global batch of {config.training.global_batch_size}"
        rule = f"the preflight rejects every layout: {rejected.key}: {rejected.rule}" if rejected else rule
        near = (world + step * sign for step in range(1, _SEARCH_RANGE) for sign in (-1, 1))
        others = [other for other in near if other >= 1]
    alternative = None
    for other in others:
        progress(f"the model does not fit; trying {other} {machine.name}")
        if fits(config, args, other, machine, dtype):
            alternative = other
            break
    if alternative is None and rejected:
        raise ConfigError(rejected)
    fix = f"use {alternative} {machine.name}" if alternative else "use GPUs with more memory"
    raise ConfigError(Problem(rule, fix, "--gpus", world))


def _check_writable(path: Path, base: Path, words: Sequence[str]) -> None:
    """Check the file to write before searching for a layout."""
    rule = ""
    if words:
        rule = f"{' '.join(words)} would be lost in a file that extends {base}"
        fix = "put these keys into a TOML and plan that"
    elif path.exists():
        rule, fix = "already exists", "choose another file, or remove it"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        rule, fix = f"{path.parent} is not a writable folder", "choose a writable file"
    if rule:
        raise ConfigError(Problem(rule, fix, "--write", str(path)))


def _write(path: Path, base: Path, config: Config, best: Candidate) -> None:
    relative = os.path.relpath(base, path.parent) if base.exists() else str(base)  # a preset
    tables: dict[str, list[str]] = {}
    for key, value in best.settings.items():
        if value != config.value(key):
            of, _, name = key.rpartition(".")
            tables.setdefault(of, []).append(f"{name} = {format_toml(value)}")
    lines = [f"# {best.layout}, by llama-toolkit plan", "", f"extends = {format_toml(relative)}"]
    for of, settings in tables.items():
        lines += ["", f"[{of}]", *settings]
    with writes("--write", path), path.open("x", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
