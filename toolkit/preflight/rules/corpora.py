"""Rules for the choice of columns, subset and split of a corpus."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from toolkit.config.schema import find_field
from toolkit.data.build import CorpusOptions, corpora
from toolkit.data.file_kinds import kind
from toolkit.data.sources import EMBEDDED
from toolkit.errors import DataError, Problem
from toolkit.preflight.planned_run import PlannedRun, rule

_ESCAPE = re.compile(r"\\[nt](?![a-zA-Z])")  # but not \nabla


@rule()
def template_has_no_escapes(run: PlannedRun) -> Iterator[Problem]:
    r"""Check that a template contains no literal ``\n``, which a shell does not convert to a line end."""
    columns = {corpus.column_key: corpus.text_column for corpus in corpora(run.config)}
    fix = "write $'{a}\\n{b}' in the shell, or set it in the file, between double quotes"
    for key, column in columns.items():
        if found := _ESCAPE.search(column):
            rule = f"contains {found[0]} as two characters, not the line end or tab that is probably meant"
            yield run.problem(key, rule, fix)


@rule()
def dataset_choices_act(run: PlannedRun) -> Iterator[Problem]:
    """Check that a subset or split is set only for a dataset of the Hub or a folder with splits."""
    for corpus in corpora(run.config):
        opened = run.opened[corpus.table]
        if isinstance(opened, DataError):
            continue  # another rule reports this
        for choice in sorted({"subset", "split"} - opened.choices):
            key = f"{corpus.table}.dataset_{choice}"
            field = find_field(key)
            if field and run.config.value(key) != field.default:
                what = repr(corpus.dataset_path or corpus.dataset)
                fix = f"remove it, or instead of {what} use a dataset with a {choice}, such as allenai/c4"
                yield run.problem(key, f"{what} has no {choice} to select", fix)


@rule()
def text_column_acts(run: PlannedRun) -> list[Problem]:
    """Check that text_column applies to a corpus with columns; embedded corpora and .txt files have none."""
    config, readers = run.config, defaultdict(list)
    for corpus in corpora(config):
        readers[corpus.column_key].append(corpus)
    return [
        run.problem(key, "no corpus that it applies to has columns", "remove it")
        for key, read_by in readers.items()
        if config.value(key) != "text"
        and not any(corpus.shape is None and _has_columns(run, corpus) for corpus in read_by)
    ]


def _has_columns(run: PlannedRun, corpus: CorpusOptions) -> bool:
    if corpus.dataset_path is None:
        return corpus.dataset not in EMBEDDED
    source = run.opened[corpus.table]  # another rule reports an error
    return isinstance(source, DataError) or any(kind(path) != "text" for path in source.files)
