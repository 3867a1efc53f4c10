"""Evaluate a model: perplexity of text, validation loss, and scores on tasks.

    llama-toolkit evaluate MODEL --text FILE                              perplexity of text
    llama-toolkit evaluate MODEL --config FILE [--table.key value ...]    loss of its validation set
    llama-toolkit evaluate MODEL --tasks hellaswag,arc_easy               tasks of lm-eval
    torchrun --nproc-per-node 2 -m toolkit evaluate MODEL ...                 sharded over ranks

MODEL is a Hugging Face folder, a Meta folder, a step-N checkpoint, or a run's folder (its newest checkpoint).
An adapter (a checkpoint or PEFT folder) loads its base; --adapter adds one to MODEL.
Several evaluations can be combined; --output writes the results as JSON. Tasks need the extra eval:
.venv/bin/python -m pip install -c constraints.txt -e '.[eval]'.

A text begins with BOS if the tokenizer adds it, else with EOS. Each token of a text is predicted once, in
windows of --seq-len tokens. Unless --stride is smaller, only the last window overlaps the previous one. The
validation set is packed, masked and averaged as in training. Exit codes: 0 done, 2 invalid arguments, 3
unusable model, tokenizer or text.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from toolkit import preflight
from toolkit.commands.arguments import (
    TEXT_FLAGS,
    add_bos_argument,
    add_model_arguments,
    command_parser,
    count,
    flags_named,
    local_path,
    local_path_text,
    output_problem,
)
from toolkit.config import Config
from toolkit.data.find_files import open_text
from toolkit.errors import (
    EXIT_FINISHED,
    ConfigError,
    DataError,
    Problem,
    install_command,
    one_line,
)
from toolkit.launcher.environment import is_reporting_rank

_WINDOW = 4096
"""Maximum tokens per window unless more are requested, because a context may have 131,072."""
_ROWS = 8
_SEQ_LEN = (
    f"for text the smallest of {_WINDOW}, the model's context and, for a checkpoint, the training.seq_len "
    "of its run; for tasks the context"
)
_COLUMN = "text"
_ACTS_WITH = {
    "--text-column": "--text",
    "--stride": "--text",
    "--task-folder": "--tasks",
    "--few-shot": "--tasks",
    "--limit": "--tasks",
}
_OF_ROWS = {"--seq-len": "--validation.seq_len", "--batch-size": "--validation.local_batch_size"}
"""Flags for texts and tasks that have equivalent config keys."""
_RULES = ("corpus_readable", "dataset_choices_act", "text_column_acts", "template_has_no_escapes")
_OF_TRAINING = ("training.", "data.mixture.")
"""Keys of corpora that are not evaluated and may be missing on this machine."""


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("evaluate", __doc__, allow_abbrev=False)
    add_model_arguments(parser)
    add_bos_argument(parser)
    add = parser.add_argument
    add(
        "--text",
        type=local_path_text,
        metavar="PATH",
        help="a file of text or .jsonl, a folder, a glob, or several with commas",
    )
    add("--text-column", metavar="NAME", help="column of the text (default: text)")
    add("--seq-len", type=count, metavar="N", help=f"tokens of a window (default: {_SEQ_LEN})")
    add("--stride", type=count, metavar="N", help="tokens that a window predicts (default: all)")
    add(
        "--config",
        type=local_path_text,
        metavar="FILE",
        help="the config whose validation set is evaluated; its flags may follow",
    )
    add("--tasks", metavar="NAMES", help="tasks of lm-eval, with commas between")
    add("--task-folder", type=local_path, metavar="PATH", help="folder of YAML files with further tasks")
    add("--few-shot", type=int, metavar="N", help="examples in each prompt (default: the task's)")
    add("--limit", type=count, metavar="N", help="only so many examples of each task")
    add("--batch-size", type=count, metavar="N", help=f"rows at a time (default: {_ROWS})")
    add("--output", type=local_path, metavar="FILE", help="write the results as JSON")
    return parser


def _check(parser: argparse.ArgumentParser, asked: argparse.Namespace, words: Sequence[str]) -> Config | None:
    """Run the checks that need no model and return the config of --config.

    Raises:
        ConfigError, DataError: a config, corpus or package is missing.
    """
    if len(asked.adapter) > 1:
        parser.error("one model is evaluated: give one --adapter")
    if not (asked.text or asked.config or asked.tasks):
        parser.error("nothing to evaluate: give --text, --config or --tasks")
    if words and not asked.config:
        parser.error(f"unrecognized arguments: {' '.join(words)} (flags of a config need --config FILE)")
    for flag, key in _OF_ROWS.items():
        if _value(asked, flag) is not None and not (asked.text or asked.tasks):
            parser.error(f"{flag} has no effect without --text or --tasks: that of --config is {key}")
    for flag, needed in _ACTS_WITH.items():
        if _value(asked, flag) is not None and not _value(asked, needed):
            parser.error(f"{flag} has no effect without {needed}")
    if asked.tasks and not _names(asked):
        parser.error(f"argument --tasks: contains no task: {asked.tasks!r}")
    if (asked.few_shot or 0) < 0:
        parser.error(f"argument --few-shot: must be a whole number of at least 0, not {asked.few_shot}")
    if asked.tasks and importlib.util.find_spec("lm_eval") is None:
        rule = "tasks need the package lm-eval, which is not installed"
        raise ConfigError(Problem(rule, install_command("eval"), "--tasks", asked.tasks))
    if asked.task_folder and not asked.task_folder.is_dir():
        fix = "name the folder of the YAML files"
        raise ConfigError(Problem("there is no such folder", fix, "--task-folder", str(asked.task_folder)))
    if asked.output and is_reporting_rank(os.environ) and (why := output_problem(asked.output)):
        raise DataError(f"cannot write {asked.output}: {why}")
    if asked.text:
        with flags_named(TEXT_FLAGS):
            notes = open_text(asked.text, asked.text_column or _COLUMN).notes
        for note in notes if is_reporting_rank(os.environ) else ():
            print(f"note   {one_line(note)}", file=sys.stderr)
    if not asked.config:
        return None
    bos = [] if asked.add_bos_token is None else [f"--model.add_bos_token={asked.add_bos_token}".lower()]

    def check(config: Config) -> None:
        preflight.raise_problems(config, world_size=1, only=_RULES, unread=_OF_TRAINING)

    flags = ["--job.config_file", asked.config, "--validation.enable", "true", *words, *bos]
    check(config := preflight.load(flags, check))
    if config.finetune.compares:
        key, fix = "finetune.objective", "give --text, or --tasks; the run's own validation compares pairs"
        rule = "pairs of answers have no next-token loss"
        raise ConfigError(Problem(rule, fix, key, config.finetune.objective, config.origin(key)))
    return config


def _names(asked: argparse.Namespace) -> list[str]:
    """Return the names in --tasks."""
    return [name.strip() for name in (asked.tasks or "").split(",") if name.strip()]


def _value(asked: argparse.Namespace, flag: str) -> Any:
    return getattr(asked, flag.lstrip("-").replace("-", "_"))


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = _parser()
    asked, words = parser.parse_known_args(argv)
    config = _check(parser, asked, words)
    from toolkit.commands.evaluations import run  # after help and checks, which need no torch

    asked.text_column, asked.batch_size = asked.text_column or _COLUMN, asked.batch_size or _ROWS
    run(asked, config, _names(asked), window=_WINDOW)
    return EXIT_FINISHED
