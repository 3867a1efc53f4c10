"""Run lm-eval tasks on a model of this toolkit. Needs the extra ``eval``.

Tokenization follows lm-eval's adapter for transformers: a context begins with BOS if the tokenizer adds it,
and a continuation is the tokens by which the encoded text exceeds those of the context. An empty context, and
a text scored as a whole, begin with BOS, or EOS if there is no BOS, whether or not the tokenizer adds it.
There is one difference: a text scored as a whole begins with one BOS, whereas lm-eval's adapter adds a second
if the tokenizer adds BOS itself.

Generation stops at EOS and, as in transformers, at the ids of generation_config.json, else of config.json.

Every rank runs all of lm-eval and requests all rows; the evaluator shards them over the ranks.
"""

from __future__ import annotations

import io
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import ConfigError, DataError, Problem, ToolkitError, did_you_mean
from toolkit.evaluation.perplexity import first_token, rolling_windows
from toolkit.evaluation.row_scores import RowScorer, ScoredRow
from toolkit.generation.generator import Generator
from toolkit.generation.sampling import Sampling

_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_SUPPORTED = {*_SAMPLED, "until", "max_gen_toks", "do_sample"}
_NEUTRAL = {"num_beams": 1, "no_repeat_ngram_size": 0, "num_return_sequences": 1, "use_cache": True}
"""Values with which transformers' settings have no effect."""
_UNSUPPORTED_TASKS = {
    "UNSAFE_CODE": "it executes code written by the model",
    "MULTIMODAL": "it needs more than text",
}
_TOP_K = 50  # transformers' default when sampling
DEFAULT_NEW_TOKENS = 256  # lm-eval's default
_SEED = 1234  # lm-eval's default


class TaskModel(TemplateLM):
    """lm-eval's interface to a model. ``length`` is the maximum input length, at most the model's context.
    Generation stops at EOS and at ``eos_ids``, by default the tokenizer's stop ids. Tasks that generate text
    need a ``generator``."""

    def __init__(
        self,
        evaluator: RowScorer,
        generator: Generator | None,
        tokenizer: Tokenizer,
        *,
        length: int,
        eos_ids: Collection[int] = (),
    ):
        super().__init__()
        self._evaluator, self._generator, self._tokenizer = evaluator, generator, tokenizer
        self._length = length
        self._stop_ids = {self.eot_token_id, *(eos_ids or tokenizer.stop_ids)}

    @property
    def eot_token_id(self) -> int:
        return self.prefix_token_id if self._tokenizer.eos_id is None else self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        bos = self._tokenizer.bos_id
        return first_token(self._tokenizer) if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, with BOS if the tokenizer adds it, unless ``add_special_tokens`` is False."""
        bos = self._tokenizer.adds_bos and add_special_tokens is not False
        return self._tokenizer.encode(string, bos=bos)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._truncate(context, continuation) for _, context, continuation in requests]
        return [(score.log_likelihood, score.greedy) for score in self._evaluator.scores(rows)]

    def _truncate(self, context: list[int], continuation: list[int]) -> ScoredRow:
        """Truncate context and continuation on the left to the model's length."""
        continuation = continuation[-self._length :]
        return ScoredRow(context[-(self._length + 1 - len(continuation)) :], continuation)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score full texts, in windows; only the last window overlaps the previous one."""
        before, rows, owners = self.prefix_token_id, [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = list(rolling_windows(ids, before=before, length=self._length))
            rows += windows
            owners += [number] * len(windows)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._evaluator.scores(rows), strict=True):
            totals[owner] += score.log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop texts appears."""
        texts = [""] * len(requests)
        order = sorted(range(len(requests)), key=lambda number: repr(requests[number].args[1]))
        for _, numbers in groupby(order, key=lambda number: repr(requests[number].args[1])):
            group = list(numbers)
            contexts = [requests[number].args[0] for number in group]
            continued = self._generate(contexts, requests[group[0]].args[1])
            for number, text in zip(group, continued, strict=True):
                texts[number] = text
        return texts

    def _generate(self, contexts: list[str], kwargs: dict[str, Any]) -> list[str]:
        if self._generator is None:
            raise DataError("a task generates text, which is not supported during training")
        options, sampling = _generation_options(kwargs)
        until: list[str] = [text for text in options["until"] if text]
        new_tokens = options["max_gen_toks"]
        if new_tokens >= self._length:
            raise DataError(
                f"a task requests {new_tokens} new tokens, but the model takes {self._length} in total\n"
                f"  fix:  set a smaller max_gen_toks in the task's generation_kwargs"
            )
        room = self._length - new_tokens
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        # Sort by length, so that batches contain little padding.
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        generated = self._generator.generate(
            [prompts[number] for number in order],
            max_new_tokens=new_tokens,
            sampling=sampling,
            stop_ids=self._stop_ids,
            stop=lambda _, tokens: self._has_stopped(tokens, until),
            batch_size=self._evaluator.batch_size,
        )
        texts = [""] * len(prompts)
        for number, tokens in zip(order, generated, strict=True):
            text = self._tokenizer.decode(tokens, skip_special=True)
            texts[number] = postprocess_generated_text(text, until, None)
        return texts

    def _has_stopped(self, tokens: list[int], until: list[str]) -> bool:
        """Report whether the last tokens contain one of ``until``; earlier tokens have already been
        checked."""
        longest = max((len(text.encode()) for text in until), default=0)
        tail = self._tokenizer.decode(tokens[-longest - 1 :]) if longest else ""
        return any(text in tail for text in until)


def _generation_options(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Sampling]:
    """Normalize a task's ``generation_kwargs`` and return its sampling options. Null means unset.

    Raises:
        DataError: an unsupported option would change the text.
        ConfigError: a sampling option is out of range.
    """
    set_kwargs = {key: value for key, value in kwargs.items() if value is not None}
    options = dict(normalize_gen_kwargs(set_kwargs, DEFAULT_NEW_TOKENS))
    other = [key for key in options if key not in _SUPPORTED and _NEUTRAL.get(key) != options[key]]
    if other:
        raise DataError(
            f"generation_kwargs: {other[0]} = {options[other[0]]!r} is not supported\n"
            f"  fix:  remove it; supported are {', '.join(sorted(_SUPPORTED))}"
        )
    sampled = {name: options[name] for name in _SAMPLED if name in options}
    if options["do_sample"]:
        sampled.setdefault("top_k", _TOP_K)
        if not sampled.get("temperature"):
            raise DataError(
                "generation_kwargs: do_sample = True needs a temperature\n"
                "  fix:  set temperature above 0, or do_sample = False"
            )
    return options, Sampling(**sampled)


def load_tasks(
    names: Sequence[str], *, folder: Path | None = None, key: str = "--tasks"
) -> list[Task | Group]:
    """Load tasks and groups by name, with their data, from the YAML files in ``folder`` or from lm-eval.
    ``key`` is the option that has the names.

    Raises:
        ConfigError: a task does not exist.
        DataError: a task cannot be loaded or run: its data is unavailable, or it is not supported.
    """
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # lm-eval has about ten thousand task files
        manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        hint = "`lm-eval ls tasks` lists its tasks; --task-folder adds those of a folder"
        fix = did_you_mean(unknown[0], manager.all_tasks, hint)
        raise ConfigError(Problem("there is no such task", fix, key, unknown[0]))
    return [loaded for name in names for loaded in _load(manager, name)]


def _load(manager: TaskManager, name: str) -> list[Task | Group]:
    """Load the task or group ``name``, or all tasks of a tag."""
    try:
        loaded = manager.load([name])
        for task in loaded["tasks"].values():
            if reasons := [why for mark, why in _UNSUPPORTED_TASKS.items() if getattr(task, mark, False)]:
                raise DataError(reasons[0])
            if task.get_config("output_type") == "generate_until":
                _generation_options(task.get_config("generation_kwargs") or {})
    except Exception as error:  # data, YAML files and task code may raise any error
        raise DataError(f"the task {name} cannot be run: {error}") from error
    groups = loaded.get("groups", {})
    return [groups[name]] if name in groups else list(loaded["tasks"].values())


def run_tasks(
    model: TaskModel, tasks: Sequence[Task | Group], *, few_shot: int | None = None, limit: int | None = None
) -> dict[str, Any] | None:
    """Return lm-eval's results of ``tasks``, with at most ``limit`` examples each; None on all ranks except
    the first of a machine.

    Raises:
        DataError: a task cannot be run: it has fewer examples than ``few_shot``, or its templates or code
            fail on an example.
    """
    with _errors_of_tasks(few_shot, "--few-shot"):
        return simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=few_shot,
            limit=limit,
            task_manager=TaskManager(include_defaults=False),
            log_samples=False,
            bootstrap_iters=1000,
        )


class PreparedTasks:
    """Tasks that are run repeatedly, as by :func:`run_tasks`, but with results on every rank and without
    standard errors."""

    def __init__(self, tasks: Sequence[Task | Group], *, few_shot: int | None, limit: int | None):
        self._loaded = TaskManager(include_defaults=False).load(list(tasks))
        self._few_shot, self._limit = few_shot, limit
        for task in self._loaded["tasks"].values():
            own = task.get_config("num_fewshot")  # a task without examples stays so, as in simple_evaluate
            task.set_config("num_fewshot", (own or 0) if few_shot is None or own == 0 else few_shot)

    def first_that_generates(self) -> str | None:
        tasks = self._loaded["tasks"].items()
        return next((name for name, task in tasks if task.OUTPUT_TYPE == "generate_until"), None)

    def higher_is_better(self, name: str, metric: str) -> bool | None:
        """Return whether higher is better in a task, or in all tasks of a group; None if it is unknown."""
        group, task = self._loaded["groups"].get(name), self._loaded["tasks"].get(name)
        tasks = group.get_all_tasks() if group else [task] if task else []
        found = {it.higher_is_better().get(metric) for it in tasks}
        return found.pop() if len(found) == 1 else None

    def run(self, model: TaskModel) -> dict[str, Any]:
        """Return lm-eval's results.

        Raises:
            DataError: as :func:`run_tasks`.
        """
        random.seed(_SEED)
        np.random.seed(_SEED)  # all ranks build the same requests
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=_SEED)
        # lm-eval has progress bars that cannot be turned off.
        with _errors_of_tasks(self._few_shot, "evaluation.few_shot"), redirect_stderr(io.StringIO()):
            return evaluate(model, self._loaded, limit=self._limit, bootstrap_iters=0, log_samples=False)


@contextmanager
def _errors_of_tasks(few_shot: int | None, key: str) -> Iterator[None]:
    """Raise all errors except the model's and torch's as a DataError; ``key`` is the option of
    ``few_shot``."""
    try:
        yield
    except (ToolkitError, RuntimeError, AssertionError):  # raised by the model or torch
        raise
    except Exception as error:  # examples, templates and task code may raise any error
        fix = "correct the task's YAML file or its data"
        if few_shot:
            fix = f"use a smaller {key} if a task has at most {few_shot} examples; else {fix}"
        raise DataError(f"lm-eval cannot run the tasks: {error}\n  fix:  {fix}") from error


def result_lines(results: dict[str, Any]) -> Iterator[str]:
    """Format one line per task and metric: task, metric, filter if any, value and standard error."""
    for task, metric, kind, value in values(results):
        error = results["results"][task].get(f"{metric}_stderr,{kind}")
        spread = f" ± {error:.4f}" if isinstance(error, float) else ""
        filtered = "" if kind == "none" else f" ({kind})"
        yield f"{task:30} {metric + filtered:30} {value:.4f}{spread}"


def values(results: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """Yield task, metric, filter ("none" for none) and value."""
    for task, found in results["results"].items():
        for key, value in found.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, float | int):
                yield task, metric, kind, value
