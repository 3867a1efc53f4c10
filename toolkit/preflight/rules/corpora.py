"""Rules about what is chosen of a corpus: columns, a subset, a split."""

from __future__ import annotations

import re
from collections import defaultdict

from toolkit.config.schema import find_field
from toolkit.data.build import CorpusOptions, corpora
from toolkit.data.file_kinds import kind
from toolkit.data.sources import EMBEDDED
from toolkit.errors import DataError, Problem
from toolkit.preflight.planned_run import PlannedRun, rule

_ESCAPE = re.compile(r"\\[nt](?![a-zA-Z])")  # but not \nabla


@rule()
def template_has_no_escapes(run: PlannedRun) -> list[Problem]:
    """A shell hands a backslash and an n on as they are, and each document would have them in its text."""
    columns = {corpus.column_key: corpus.text_column for corpus in corpora(run.config)}
    fix = "write $'{a}\\n{b}' in the shell, or set it in the file, between double quotes"
    return [
        run.problem(
            key, f"it holds {found[0]} as two characters, not the line end or the tab that is meant", fix
        )
        for key, column in columns.items()
        if (found := _ESCAPE.search(column))
    ]


@rule()
def dataset_choices_act(run: PlannedRun) -> list[Problem]:
    """A subset or a split chooses from what has several: a dataset of the hub, or a folder with splits."""
    problems = []
    for corpus in corpora(run.config):
        opened = run.opened[corpus.table]
        if isinstance(opened, DataError):
            continue  # another rule says what is wrong
        for choice in sorted({"subset", "split"} - opened.choices):
            key = f"{corpus.table}.dataset_{choice}"
            field = find_field(key)
            if field and run.config.value(key) != field.default:
                what = repr(corpus.dataset_path or corpus.dataset)
                fix = f"remove it, or name in place of {what} what has a {choice}, such as allenai/c4"
                problems.append(run.problem(key, f"{what} has no {choice} to choose", fix))
    return problems


@rule()
def text_column_acts(run: PlannedRun) -> list[Problem]:
    """JSON, Parquet and datasets have columns; the shipped corpora and .txt files have none to name."""
    config, readers = run.config, defaultdict(list)
    for corpus in corpora(config):
        readers[corpus.column_key].append(corpus)
    return [
        run.problem(key, "no text that it is for has columns", "remove it")
        for key, read_by in readers.items()
        if config.value(key) != "text"
        and not any(corpus.shape is None and _has_columns(run, corpus) for corpus in read_by)
    ]


def _has_columns(run: PlannedRun, corpus: CorpusOptions) -> bool:
    if corpus.dataset_path is None:
        return corpus.dataset not in EMBEDDED
    source = run.opened[corpus.table]  # of an error another rule tells
    return isinstance(source, DataError) or any(kind(path) != "text" for path in source.files)
