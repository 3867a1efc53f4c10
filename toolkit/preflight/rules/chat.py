"""Rules for corpora of conversations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from toolkit.config.schema import find_field
from toolkit.data.build import CorpusOptions, corpora
from toolkit.data.chat.shapes import unknown_names
from toolkit.data.corpus import PREFERENCE, UNPAIRED
from toolkit.errors import DataError, Problem
from toolkit.preflight.planned_run import PlannedRun, rule

_FOR_CONVERSATIONS = (
    "chat_template",
    "chat_template_kwargs",
    "train_on",
    "mask_empty_thinking",
    "empty_mask",
)


def _set(run: PlannedRun, key: str) -> bool:
    field = find_field(key)
    return field is not None and run.config.value(key) != field.default


@rule()
def formats_act(run: PlannedRun) -> Iterator[Problem]:
    """Check that conversation options apply to at least one corpus of the run."""
    used_corpora = corpora(run.config)
    for name in ("format", "columns"):
        key, used = f"data.{name}", {getattr(corpus, f"{name}_key") for corpus in used_corpora}
        if _set(run, key) and key not in used:
            yield run.problem(key, f"every corpus sets its own {name}", "remove it")
    if any(corpus.shape for corpus in used_corpora):
        return
    fix = 'remove it, or set data.format = "messages" (or sharegpt, alpaca, prompt_completion)'
    for key in (f"data.{name}" for name in _FOR_CONVERSATIONS):
        if _set(run, key):
            yield run.problem(key, "no corpus of the run contains conversations", fix)


@rule()
def pairs_are_compared(run: PlannedRun) -> list[Problem]:
    """Check that preferences are used only with an objective that learns from them."""
    paired = [corpus for corpus in corpora(run.config) if corpus.format in (PREFERENCE, UNPAIRED)]
    if not paired or run.config.finetune.compares:
        return []
    key = paired[0].format_key
    if paired[0].format == UNPAIRED:
        rule = f"rows may contain undesirable answers ({key}), and all would be trained on"
        return [run.problem("finetune.objective", rule, 'set it to "kto"', key)]
    rule = f"rows contain a rejected answer next to the chosen one ({key}), and both would be trained on"
    columns = '{completion = "chosen"}'
    objectives = '"dpo" (or kto, cpo, simpo, orpo, reward)'
    fix = f'set finetune.objective to {objectives}, or {key} to "prompt_completion" with columns = {columns}'
    return [run.problem("finetune.objective", rule, fix, key)]


@rule()
def columns_known(run: PlannedRun) -> list[Problem]:
    """Check that only columns of the format are renamed."""
    unknown = (_unknown_column(run, corpus) for corpus in corpora(run.config))
    return list({problem.key: problem for problem in unknown if problem}.values())


def _unknown_column(run: PlannedRun, corpus: CorpusOptions) -> Problem | None:
    if corpus.format == "text":
        if not corpus.columns:
            return None
        fix = f"set {corpus.column_key} instead, or {corpus.format_key} to the format of the conversations"
        return run.problem(corpus.columns_key, "plain text has one column, set by text_column", fix)
    if (
        corpus.format == PREFERENCE
        and "margin" in corpus.columns
        and run.config.finetune.objective != "reward"
    ):
        rule = "only reward models use margins"
        return run.problem(corpus.columns_key, rule, "remove margin", "finetune.objective")
    wrong = unknown_names(corpus.format, corpus.columns)
    return (
        run.problem(corpus.columns_key, wrong, "write one of these on the left, and your column on the right")
        if wrong
        else None
    )


@rule(DataError)
def chat_template_readable(run: PlannedRun) -> list[Problem]:
    """Check that the chat template exists, is valid and uses the given variables."""
    data = run.config.data
    if not any(corpus.shape for corpus in corpora(run.config)) or not data.chat_template:
        return []
    from toolkit.data.chat.choose_format import check_asked  # needs jinja

    try:
        check_asked(data.chat_template, data.chat_template_kwargs, data.mask_empty_thinking)
    except DataError as error:
        rule, _, fix = str(error).partition("\n  fix:  ")
        return [run.problem("data.chat_template", rule, fix or "correct the template")]
    return []


@rule()
def empty_thinking_is_masked(run: PlannedRun) -> list[Problem]:
    """Check that think blocks are excluded from the loss only if other tokens are excluded too."""
    if not run.config.data.mask_empty_thinking or run.config.data.train_on != "all":
        return []
    rule = 'with data.train_on = "all" every token is trained on'
    return [run.problem("data.mask_empty_thinking", rule, 'set it to false, or train_on to "assistant"')]


@rule()
def new_tokens_have_rows(run: PlannedRun) -> Iterator[Problem]:
    """Check that new special tokens are unique and trained."""
    key = "model.additional_special_tokens"
    tokens = run.config.model.additional_special_tokens
    twice = [token for token, times in Counter(tokens).items() if times > 1]
    if twice or not all(token.strip() for token in tokens):
        rule = f"{twice[0]} is listed twice" if twice else "contains an empty token"
        yield run.problem(key, rule, "list each token once, such as <|prompter|>")
    if tokens and run.config.finetune.adds:
        fix = (
            "train all weights, or first add the tokens and their rows to the base model with "
            "llama-toolkit convert --vocab-size"
        )
        yield run.problem(key, "an adapter's base model has no rows for them", fix)
