"""Results of ``llama-toolkit evaluate``: loss on text and on a validation set, and scores on tasks."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from tqdm import tqdm

from toolkit.commands.arguments import TEXT_FLAGS, flags_named
from toolkit.commands.load_asked import load_as_asked
from toolkit.config import Config
from toolkit.data.build import corpora, open_tokens, run_tokenizer
from toolkit.data.build_loader import validation_loader
from toolkit.data.run_data import RunData
from toolkit.distributed import process_group
from toolkit.errors import ConfigError, DataError, Problem
from toolkit.evaluation.perplexity import Evaluator, TextLoss, documents, text_loss
from toolkit.generation.load import LoadedModel, require_tokenizer
from toolkit.launcher.environment import is_reporting_rank

Item = TypeVar("Item")


def text_result(
    loaded: LoadedModel, evaluator: Evaluator, asked: argparse.Namespace, length: int
) -> TextLoss:
    """Return the loss on the files of --text."""
    texts = _counted(documents(asked.text, asked.text_column), "documents")
    with flags_named(TEXT_FLAGS):
        return text_loss(evaluator, require_tokenizer(loaded), texts, length=length, stride=asked.stride)


def validation_result(loaded: LoadedModel, evaluator: Evaluator, config: Config) -> TextLoss:
    """Return the loss on the validation set of ``config``, as in training.

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
    shown, limit = is_reporting_rank(os.environ), config.data.max_inline_gb
    cache = open_tokens(config, corpus, tokenizer, progress=shown, max_inline_gb=limit)
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
    batches = islice(loader, None if options.steps == -1 else options.steps)
    return evaluator.loss(_counted(batches, "batches"))


def task_results(
    loaded: LoadedModel, evaluator: Evaluator, tasks: Sequence[Any], asked: argparse.Namespace, length: int
) -> dict[str, Any]:
    """Run ``tasks`` with lm-eval; print and return the results on rank 0."""
    from toolkit.evaluation.lm_eval import TaskModel, result_lines, run_tasks

    tokenizer, ends = require_tokenizer(loaded), loaded.eos_ids
    model = TaskModel(evaluator, loaded.generator(), tokenizer, length=length, eos_ids=ends)
    found = run_tasks(model, tasks, few_shot=asked.few_shot, limit=asked.limit)
    if found is None:
        return {}
    for line in result_lines(found):
        _say(line)
    return found["results"]


def _counted(items: Iterable[Item], unit: str) -> Iterable[Item]:
    """Count ``items`` on rank 0's terminal as they are evaluated."""
    return tqdm(items, unit=f" {unit}", disable=None if is_reporting_rank(os.environ) else True)


def _say(text: str) -> None:
    if is_reporting_rank(os.environ):
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


def run(asked: argparse.Namespace, config: Config | None, names: Sequence[str], *, window: int) -> None:
    """Evaluate the model on the text, the validation set of ``config`` and the tasks ``names``.

    ``window`` is the largest number of tokens in a window of text unless --seq-len is given.

    Raises:
        ConfigError, DataError, CheckpointError: model, text, tasks or flags cannot be used.
    """
    if names:
        from toolkit.evaluation.lm_eval import load_tasks

        tasks = load_tasks(names, folder=asked.task_folder)
    add_bos = config.model.add_bos_token if config else asked.add_bos_token
    loaded = load_as_asked(asked, add_bos=add_bos)
    evaluator = Evaluator(loaded.model, batch_size=asked.batch_size, mesh=loaded.mesh)
    longest = loaded.args.max_seq_len
    length = asked.seq_len or min(longest, loaded.seq_len or longest, window)
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
    if names:
        results["tasks"] = task_results(loaded, evaluator, tasks, asked, asked.seq_len or longest)
    if asked.output and is_reporting_rank(os.environ):
        try:
            asked.output.write_text(json.dumps(results, indent=2, default=str) + "\n")
        except OSError as error:
            raise DataError(f"cannot write {asked.output}: {error.strerror}") from error
    process_group.stop()
