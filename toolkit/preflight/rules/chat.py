"""Rules about corpora of conversations."""

from __future__ import annotations

from collections import Counter

from toolkit.config.schema import find_field
from toolkit.data.build import CorpusOptions, corpora
from toolkit.data.chat.shapes import unknown_names
from toolkit.data.corpus import PREFERENCE
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
def formats_act(run: PlannedRun) -> list[Problem]:
    """Options of conversations are for some corpus that the run reads."""
    read = corpora(run.config)
    problems = []
    for name in ("format", "columns"):
        key, used = f"data.{name}", {getattr(corpus, f"{name}_key") for corpus in read}
        if _set(run, key) and key not in used:
            problems.append(run.problem(key, f"every corpus has its own {name}", "remove it"))
    if any(corpus.shape for corpus in read):
        return problems
    fix = 'remove it, or set data.format = "messages" (or sharegpt, alpaca, prompt_completion)'
    return problems + [
        run.problem(key, "no corpus of the run holds conversations", fix)
        for key in (f"data.{name}" for name in _FOR_CONVERSATIONS)
        if _set(run, key)
    ]


@rule()
def pairs_are_compared(run: PlannedRun) -> list[Problem]:
    """Pairs of answers are read by an objective that tells the chosen from the rejected."""
    paired = [corpus for corpus in corpora(run.config) if corpus.format == PREFERENCE]
    if not paired or run.config.finetune.objective == "dpo":
        return []
    key = paired[0].format_key
    rule = f"a row holds a rejected answer beside the chosen ({key}), and both would be learnt"
    columns = '{completion = "chosen"}'
    fix = f'set it to "dpo", or {key} to "prompt_completion" with columns = {columns}'
    return [run.problem("finetune.objective", rule, fix)]


@rule()
def columns_known(run: PlannedRun) -> list[Problem]:
    """Other names are given for names that the format has."""
    found = (_unknown_column(run, corpus) for corpus in corpora(run.config))
    return list({problem.key: problem for problem in found if problem}.values())


def _unknown_column(run: PlannedRun, corpus: CorpusOptions) -> Problem | None:
    if corpus.format == "text":
        if not corpus.columns:
            return None
        fix = (
            f"set {corpus.column_key} in its place, or {corpus.format_key} to the format of the conversations"
        )
        return run.problem(corpus.columns_key, "a text is in one column, which text_column names", fix)
    wrong = unknown_names(corpus.format, corpus.columns)
    return (
        run.problem(corpus.columns_key, wrong, "name one of these on the left, and your column on the right")
        if wrong
        else None
    )


@rule(DataError)
def chat_template_readable(run: PlannedRun) -> list[Problem]:
    """The template is there and is one, and uses the variables that it is given."""
    data = run.config.data
    if not any(corpus.shape for corpus in corpora(run.config)) or not data.chat_template:
        return []
    from toolkit.data.chat.formats import check_asked  # needs jinja

    try:
        check_asked(data.chat_template, data.chat_template_kwargs, data.mask_empty_thinking)
    except DataError as error:
        rule, _, fix = str(error).partition("\n  fix:  ")
        return [run.problem("data.chat_template", rule, fix or "correct the template")]
    return []


@rule()
def empty_thinking_is_masked(run: PlannedRun) -> list[Problem]:
    """A think block is left out of the loss where answers alone are learnt."""
    if not run.config.data.mask_empty_thinking or run.config.data.train_on != "all":
        return []
    rule = 'with data.train_on = "all" every token is learnt'
    return [run.problem("data.mask_empty_thinking", rule, 'set it to false, or train_on to "assistant"')]


@rule()
def new_tokens_have_rows(run: PlannedRun) -> list[Problem]:
    """New special tokens are named once, and trained."""
    key = "model.additional_special_tokens"
    tokens = run.config.model.additional_special_tokens
    problems = []
    twice = [token for token, times in Counter(tokens).items() if times > 1]
    if twice or not all(token.strip() for token in tokens):
        said = f"{twice[0]} is there twice" if twice else "a token without a name"
        problems.append(run.problem(key, said, "name each token once, such as <|prompter|>"))
    if tokens and run.config.finetune.adds:
        fix = (
            "train all weights, or add the tokens and rows to the base first, "
            "with tools.convert_weights --vocab-size"
        )
        problems.append(run.problem(key, "an adapter's base has no rows for them", fix))
    return problems
