"""Evaluate a model: perplexity of text, validation loss, and scores on tasks.

    python -m tools.evaluate MODEL --text FILE                              perplexity of text
    python -m tools.evaluate MODEL --config FILE [--table.key value ...]    loss of its validation set
    python -m tools.evaluate MODEL --tasks hellaswag,arc_easy               tasks of lm-eval
    torchrun --nproc-per-node 2 -m tools.evaluate MODEL ...                 sharded over ranks

MODEL is a Hugging Face folder, a Meta folder, a step-N checkpoint, or a run's folder (its newest checkpoint).
An adapter (a checkpoint or PEFT folder) loads its base; --adapter adds one to MODEL.
Several evaluations can be combined; --output writes the results as JSON. Tasks need the extra eval:
.venv/bin/python -m pip install -c constraints.txt -e '.[eval]'.

A text begins with BOS if the tokenizer adds it, else with EOS. Each of its tokens is predicted once, in
windows of --seq-len tokens, of which only the last overlaps the previous one, unless --stride is smaller. The
validation set is packed, masked and averaged as in training. Exit codes: 0 done, 2 invalid arguments, 3
unusable model, tokenizer or text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

from toolkit import preflight
from toolkit.config import Config, load_config
from toolkit.data.build import corpora, open_tokens, run_tokenizer
from toolkit.data.build_loader import validation_loader
from toolkit.data.find_files import open_text
from toolkit.data.run_data import RunData
from toolkit.distributed import process_group
from toolkit.errors import (
    EXIT_FINISHED,
    ConfigError,
    DataError,
    Problem,
    ToolkitError,
    install_command,
    one_line,
    report,
)
from toolkit.evaluation.perplexity import Evaluator, TextLoss, documents, text_loss
from toolkit.generation.load import LoadedModel, require_tokenizer
from toolkit.io import standard_streams
from toolkit.launcher.environment import is_reporting_rank
from tools.arguments import count, flags_named, local_path, local_path_text, output_problem
from tools.cli import add_bos_argument, add_model_arguments, load_as_asked

_WINDOW = 4096
"""The most tokens of a window unless more are asked for: a context may be of 131,072."""
_ROWS = 8
_SEQ_LEN = (
    f"for text the smallest of {_WINDOW}, the model's context and, for a checkpoint, the training.seq_len "
    "of its run; for tasks the context"
)
_TEXT_FLAGS = {"training.dataset_path": "--text", "data.text_column": "--text-column"}
_COLUMN = "text"
_ACTS_WITH = {
    "--text-column": "--text",
    "--stride": "--text",
    "--task-folder": "--tasks",
    "--few-shot": "--tasks",
    "--limit": "--tasks",
}
_OF_ROWS = {"--seq-len": "--validation.seq_len", "--batch-size": "--validation.local_batch_size"}
"""Flags of texts and tasks, which a config has keys for."""
_RULES = ("corpus_readable", "dataset_choices_act", "text_column_acts", "template_has_no_escapes")
_OF_TRAINING = ("training.", "data.mixture.")
"""Keys of the corpora that are not evaluated, and need not be here."""


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    add(
        "--task-folder",
        type=local_path,
        metavar="PATH",
        help="folder of YAML files with further tasks",
    )
    add("--few-shot", type=int, metavar="N", help="examples in each prompt (default: the task's)")
    add("--limit", type=count, metavar="N", help="only so many examples of each task")
    add("--batch-size", type=count, metavar="N", help=f"rows at a time (default: {_ROWS})")
    add("--output", type=local_path, metavar="FILE", help="write the results as JSON")
    add("--debug", action="store_true", help="show tracebacks")
    return parser


def text_result(
    loaded: LoadedModel, evaluator: Evaluator, asked: argparse.Namespace, length: int
) -> TextLoss:
    """Loss on the files of --text."""
    texts = documents(asked.text, asked.text_column or _COLUMN)
    with flags_named(_TEXT_FLAGS):
        return text_loss(evaluator, require_tokenizer(loaded), texts, length=length, stride=asked.stride)


def validation_result(loaded: LoadedModel, evaluator: Evaluator, config: Config) -> TextLoss:
    """Loss on the validation set of ``config``, as in training.

    Raises:
        ConfigError: samples are longer than the model's context.
        DataError: the corpus or the tokenizer is unusable.
    """
    options, longest = config.validation, loaded.args.max_seq_len
    if options.seq_len > longest:
        rule = f"a sample must fit the model's context of {longest} tokens"
        fix = f"--validation.seq_len {longest}"
        origin = config.origin("validation.seq_len")
        raise ConfigError(Problem(rule, fix, "validation.seq_len", options.seq_len, origin))
    tokenizer = run_tokenizer(config) if loaded.tokenizer is None else require_tokenizer(loaded)
    corpus = next(corpus for corpus in corpora(config) if corpus.table == "validation")
    limit = config.data.max_inline_gb
    cache = open_tokens(config, corpus, tokenizer, progress=_is_chief(), max_inline_gb=limit)
    mesh = loaded.mesh
    loader = validation_loader(
        config,
        RunData(tokenizer.n_words, tokenizer.pad_id, {"validation": cache}),
        dp_rank=mesh.dp_rank if mesh else 0,
        dp_size=mesh.dp_size if mesh else 1,
    )
    assert loader is not None, "there is a validation set"
    if options.steps != -1:
        samples = options.steps * options.local_batch_size * (mesh.dp_size if mesh else 1)
        _say(
            f"note: validation.steps are batches of each rank, here {samples} samples at most in all; a run "
            "on other ranks had others (--validation.steps -1 --validation.samples N takes N)"
        )
    return evaluator.loss(islice(loader, None if options.steps == -1 else options.steps))


def task_results(
    loaded: LoadedModel, evaluator: Evaluator, tasks: Sequence[Any], asked: argparse.Namespace, length: int
) -> dict[str, Any]:
    """Run ``tasks`` with lm-eval; prints and returns the results on rank 0."""
    from toolkit.evaluation.lm_eval import TaskModel, result_lines, run_tasks

    tokenizer, ends = require_tokenizer(loaded), loaded.eos_ids
    model = TaskModel(evaluator, loaded.generator(), tokenizer, length=length, eos_ids=ends)
    found = run_tasks(model, tasks, few_shot=asked.few_shot, limit=asked.limit)
    if found is None:
        return {}
    for line in result_lines(found):
        _say(line)
    return found["results"]


def _is_chief() -> bool:
    return is_reporting_rank(os.environ)  # also before the ranks have met


def _say(text: str) -> None:
    if _is_chief():
        print(text, flush=True)


def _report(name: str, loss: TextLoss) -> dict[str, Any]:
    """Print a result and return its entry for --output."""
    bits = loss.bits_per_byte
    _say(
        f"{name}: {loss.tokens:,} tokens, loss {loss.mean:.5f} nats per token, "
        f"perplexity {loss.perplexity:.4f}" + (f", {bits:.4f} bits per byte" if bits is not None else "")
    )
    kept = {"tokens": loss.tokens, "loss": loss.mean, "perplexity": loss.perplexity}
    return kept | ({} if bits is None else {"bits_per_byte": bits})


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
    if asked.output and _is_chief() and (why := output_problem(asked.output)):
        raise DataError(f"cannot write {asked.output}: {why}")
    if asked.text:
        with flags_named(_TEXT_FLAGS):
            for note in open_text(asked.text, asked.text_column or _COLUMN).notes if _is_chief() else ():
                print(f"note   {one_line(note)}", file=sys.stderr)
    if not asked.config:
        return None
    bos = [] if asked.add_bos_token is None else [f"--model.add_bos_token={asked.add_bos_token}".lower()]
    config = load_config(["--job.config_file", asked.config, "--validation.enable", "true", *words, *bos])
    preflight.raise_problems(config, world_size=1, only=_RULES, unread=_OF_TRAINING)
    if config.finetune.objective == "dpo":
        key, fix = "finetune.objective", "give --text, or --tasks; the run's own validation compares pairs"
        rule = "pairs of answers have no loss without the reference of their run"
        raise ConfigError(Problem(rule, fix, key, "dpo", config.origin(key)))
    return config


def _names(asked: argparse.Namespace) -> list[str]:
    """Names of --tasks."""
    return [name.strip() for name in (asked.tasks or "").split(",") if name.strip()]


def _value(asked: argparse.Namespace, flag: str) -> Any:
    return getattr(asked, flag.lstrip("-").replace("-", "_"))


def _evaluate(parser: argparse.ArgumentParser, asked: argparse.Namespace, words: Sequence[str]) -> None:
    config = _check(parser, asked, words)
    if asked.tasks:
        from toolkit.evaluation.lm_eval import load_tasks

        tasks = load_tasks(_names(asked), folder=asked.task_folder)
    add_bos = config.model.add_bos_token if config else asked.add_bos_token
    loaded = load_as_asked(asked, add_bos=add_bos)
    evaluator = Evaluator(loaded.model, batch_size=asked.batch_size or _ROWS, mesh=loaded.mesh)
    longest = loaded.args.max_seq_len
    length = asked.seq_len or min(longest, loaded.seq_len or longest, _WINDOW)
    if length > longest or (asked.stride or 1) > length:
        name, value = ("--seq-len", length) if length > longest else ("--stride", asked.stride)
        most = min(length, longest)
        raise ConfigError(Problem(f"it is at most {most} here", f"give {name} {most} or less", name, value))
    results: dict[str, Any] = {"model": str(asked.model)}
    if asked.text:
        results["text"] = {"path": asked.text, "seq_len": length, "stride": asked.stride or length}
        results["text"] |= _report(asked.text, text_result(loaded, evaluator, asked, length))
    if config is not None:
        found = validation_result(loaded, evaluator, config)
        results["validation"] = _report(f"validation set of {asked.config}", found)
    if asked.tasks:
        results["tasks"] = task_results(loaded, evaluator, tasks, asked, asked.seq_len or longest)
    if asked.output and _is_chief():
        try:
            asked.output.write_text(json.dumps(results, indent=2, default=str) + "\n")
        except OSError as error:
            raise DataError(f"cannot write {asked.output}: {error.strerror}") from error


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = _parser()
    asked, words = parser.parse_known_args(argv)
    try:
        _evaluate(parser, asked, words)
    except ToolkitError as error:
        return report(error, show=_is_chief(), debug=asked.debug)
    process_group.stop()
    return EXIT_FINISHED


if __name__ == "__main__":
    standard_streams.protect(end_with_reader=True)
    sys.exit(standard_streams.exit_code(main(sys.argv[1:])))
