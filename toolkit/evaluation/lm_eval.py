"""Tasks of lm-eval on a model of ours: the adapter between its requests and ours. Needs the extra ``eval``.

Texts become tokens as lm-eval's own adapter to transformers makes them: a context begins with BOS where the
tokenizer adds it, and a continuation is what its tokens add to those of the context. Where there is no
context, and before a text that is scored as a whole, comes BOS, or EOS where there is none, whether or not
the tokenizer adds it. There is one difference: a whole text begins with one BOS, where that adapter would
have two for a tokenizer that adds BOS by itself.

Texts end where transformers ends them by generation_config.json, else by config.json, and at EOS.

Every rank runs all of lm-eval alike and asks for all rows; the ranks share them where the model is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager

from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import ConfigError, DataError, Problem, ToolkitError, did_you_mean
from toolkit.evaluation.perplexity import Evaluator, Row, first_token, rolling_windows
from toolkit.generation.generator import Generator
from toolkit.generation.sampling import Sampling

_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_TAKEN = {*_SAMPLED, "until", "max_gen_toks", "do_sample"}
_NEUTRAL = {"num_beams": 1, "no_repeat_ngram_size": 0, "num_return_sequences": 1, "use_cache": True}
"""Values of transformers' settings with which they change nothing."""
_UNFIT = {"UNSAFE_CODE": "it runs code that a model writes", "MULTIMODAL": "it asks for more than text"}
_TOP_K = 50  # transformers' own, where texts are drawn
DEFAULT_NEW_TOKENS = 256  # lm-eval's own


class TaskModel(TemplateLM):
    """A model as lm-eval wants it. ``length`` is the longest input, at most the model's context. Texts end at
    ``eos_ids`` and EOS; without any, at all at which the tokenizer says that they end."""

    def __init__(
        self,
        evaluator: Evaluator,
        generator: Generator,
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
        """Ids of a text, with BOS (where the tokenizer adds it) unless ``add_special_tokens`` is False."""
        bos = self._tokenizer.adds_bos and add_special_tokens is not False
        return self._tokenizer.encode(string, bos=bos)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._fitting(context, continuation) for _, context, continuation in requests]
        return [(found.log_likelihood, found.greedy) for found in self._evaluator.scores(rows)]

    def _fitting(self, context: list[int], continuation: list[int]) -> Row:
        """The end of both that the model can take."""
        continuation = continuation[-self._length :]
        return Row(context[-(self._length + 1 - len(continuation)) :], continuation)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in windows of which only the last overlaps the one before."""
        before, rows, owners = self.prefix_token_id, [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            found = list(rolling_windows(ids, before=before, length=self._length))
            rows += found
            owners += [number] * len(found)
        totals = [0.0] * len(requests)
        for owner, score in zip(owners, self._evaluator.scores(rows), strict=True):
            totals[owner] += score.log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to the first of the texts that end it."""
        made = [""] * len(requests)
        asked = sorted(range(len(requests)), key=lambda number: repr(requests[number].args[1]))
        for _, numbers in groupby(asked, key=lambda number: repr(requests[number].args[1])):
            alike = list(numbers)
            contexts = [requests[number].args[0] for number in alike]
            texts = self._generate(contexts, requests[alike[0]].args[1])
            for number, text in zip(alike, texts, strict=True):
                made[number] = text
        return made

    def _generate(self, contexts: list[str], wishes: dict[str, Any]) -> list[str]:
        wanted, sampling = _wanted(wishes)
        until: list[str] = [text for text in wanted["until"] if text]
        new_tokens = wanted["max_gen_toks"]
        if new_tokens >= self._length:
            raise DataError(
                f"a task asks for {new_tokens} new tokens, and the model takes {self._length} in all\n"
                f"  fix:  a smaller max_gen_toks in the task's generation_kwargs"
            )
        room = self._length - new_tokens
        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        # Prompts of like length beside one another: little of a batch is padding.
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        made = self._generator.generate(
            [prompts[number] for number in order],
            max_new_tokens=new_tokens,
            sampling=sampling,
            stop_ids=self._stop_ids,
            stop=lambda _, tokens: self._ended(tokens, until),
            batch_size=self._evaluator.batch_size,
        )
        texts = [""] * len(prompts)
        for number, tokens in zip(order, made, strict=True):
            text = self._tokenizer.decode(tokens, skip_special=True)
            texts[number] = postprocess_generated_text(text, until, None)
        return texts

    def _ended(self, tokens: list[int], until: list[str]) -> bool:
        """Say if one of ``until`` has come: in the last tokens, since the earlier ones were looked at."""
        longest = max((len(text.encode()) for text in until), default=0)
        tail = self._tokenizer.decode(tokens[-longest - 1 :]) if longest else ""
        return any(text in tail for text in until)


def _wanted(wishes: Mapping[str, Any]) -> tuple[dict[str, Any], Sampling]:
    """``generation_kwargs`` of a task under one name each, and what they say of sampling. Null is unset.

    Raises:
        DataError: one would change the text and is not supported.
        ConfigError: one of sampling is out of range.
    """
    given = {key: value for key, value in wishes.items() if value is not None}
    wanted = dict(normalize_gen_kwargs(given, DEFAULT_NEW_TOKENS))
    other = [key for key in wanted if key not in _TAKEN and _NEUTRAL.get(key) != wanted[key]]
    if other:
        raise DataError(
            f"generation_kwargs: {other[0]} = {wanted[other[0]]!r} is not supported\n"
            f"  fix:  remove it; there are {', '.join(sorted(_TAKEN))}"
        )
    sampled = {name: wanted[name] for name in _SAMPLED if name in wanted}
    if wanted["do_sample"]:
        sampled.setdefault("top_k", _TOP_K)
        if not sampled.get("temperature"):
            raise DataError(
                "generation_kwargs: do_sample = True needs a temperature\n"
                "  fix:  set temperature above 0, or do_sample = False"
            )
    return wanted, Sampling(**sampled)


def load_tasks(names: Sequence[str], *, folder: Path | None = None) -> list[Task | Group]:
    """The tasks and groups called ``names``, those in the YAML files of ``folder`` or lm-eval's own, with
    their data.

    Raises:
        ConfigError: there is no such task.
        DataError: one cannot be loaded or run: its data cannot be had, or it asks for what is not supported.
    """
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):  # its own are some ten thousand files
        manager = TaskManager(include_path=folder)
    if unknown := [name for name in names if name not in manager.all_tasks]:
        there = "`lm-eval ls tasks` lists its own; --task-folder adds those of a folder"
        fix = did_you_mean(unknown[0], manager.all_tasks, there)
        raise ConfigError(Problem("there is no such task", fix, "--tasks", unknown[0]))
    return [loaded for name in names for loaded in _load(manager, name)]


def _load(manager: TaskManager, name: str) -> list[Task | Group]:
    """The task or group called ``name``, or all tasks of a tag."""
    try:
        found = manager.load([name])
        for task in found["tasks"].values():
            if unfit := [why for mark, why in _UNFIT.items() if getattr(task, mark, False)]:
                raise DataError(unfit[0])
            if task.get_config("output_type") == "generate_until":
                _wanted(task.get_config("generation_kwargs") or {})
    except Exception as error:  # whatever its data, its YAML file or its own code come to
        raise DataError(f"the task {name} cannot be run: {error}") from error
    groups = found.get("groups", {})
    return [groups[name]] if name in groups else list(found["tasks"].values())


def run_tasks(
    model: TaskModel,
    tasks: Sequence[Task | Group],
    *,
    few_shot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any] | None:
    """lm-eval's results of ``tasks``; ``limit`` takes so many examples of each. None on ranks other than the
    first of a machine.

    Raises:
        DataError: a task cannot be run: it has fewer examples than ``few_shot``, or one that its templates or
            its code do not take.
    """
    try:
        return simple_evaluate(
            model,
            tasks=list(tasks),
            num_fewshot=few_shot,
            limit=limit,
            task_manager=TaskManager(include_defaults=False),
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (ToolkitError, RuntimeError, AssertionError):  # of the model's side, as torch's
        raise
    except Exception as error:  # whatever a task's examples, templates or code come to
        fix = "correct the task's YAML file or its data"
        if few_shot:
            fix = f"give a smaller --few-shot, where a task has no more than {few_shot} examples; else {fix}"
        raise DataError(f"lm-eval cannot run the tasks: {error}\n  fix:  {fix}") from error


def result_lines(found: dict[str, Any]) -> Iterator[str]:
    """A line for each metric of each task: task, metric, filter where there is one, value and its error."""
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, float | int):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            spread = f" ± {error:.4f}" if isinstance(error, float) else ""
            filtered = "" if kind == "none" else f" ({kind})"
            yield f"{task:30} {metric + filtered:30} {value:.4f}{spread}"
