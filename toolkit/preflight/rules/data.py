"""Rules about the folders that a run writes, and the corpora that it reads: of the training, of a mixture and
of the validation alike."""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from toolkit.config import Config
from toolkit.config.precedence import is_set
from toolkit.config.schema import find_field
from toolkit.data.build import CorpusOptions, corpora
from toolkit.data.content_hash import too_large, unread
from toolkit.data.corpus import Corpus, kind
from toolkit.data.run_data import BASE_CORPUS
from toolkit.data.sources import (
    EMBEDDED,
    STAND_INS,
    check_name,
    choices_read,
    problem_of,
)
from toolkit.errors import DataError, Problem
from toolkit.preflight.planned_run import PlannedRun, note, rule

_DATA_KEYS = (
    "data.",
    "training.dataset",
    "validation.dataset",
    "validation.base_corpus",
    "validation.enable",
    "finetune.classification",
)
_ESCAPE = re.compile(r"\\[nt](?![a-zA-Z])")  # but not \nabla
_TOKENIZER_KEYS = ("model.tokenizer_path", "model.hf_assets_path")


@rule()
def folders_writable(run: PlannedRun) -> list[Problem]:
    """The run can create the folders that it writes to."""
    config = run.config
    folders = {"job.dump_folder": config.job.dump_folder}
    if not Path(os.path.expanduser(config.data.cache_folder), "tokens").is_dir():  # else it may have all
        folders["data.cache_folder"] = config.data.cache_folder
    if config.checkpoint.enable:
        folders["checkpoint.folder"] = str(run.checkpoints)
    if config.metrics.enable_tensorboard:
        folders["metrics.save_tb_folder"] = str(run.dump_folder / config.metrics.save_tb_folder)
    if config.compile.enable and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # which goes before it
        folders["compile.cache_folder"] = config.compile.cache_folder
    problems: dict[str, Problem] = {}  # by rule: what is wrong with a folder is so of those inside it
    for key, folder in folders.items():
        rule, fix = _unusable(folder)
        if rule:
            problems.setdefault(rule, run.problem(key, rule, fix))
    return list(problems.values())


def _unusable(folder: str) -> tuple[str, str]:
    """Why a folder cannot be written to or made, and what to do; "" where it can."""
    place = Path(os.path.expanduser(folder)).absolute()
    if not folder:
        return "the name of the folder is empty", 'name a folder; "." is the present one'
    if os.path.expanduser(folder).startswith("~"):
        return f"there is no user {Path(folder).parts[0][1:]}, whose folder ~ would be", "name a folder"
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder", "name another folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return (
            f"{place} cannot be written to",
            "name another folder, or give this user permission to write there",
        )
    return "", ""


@rule(DataError)
def corpus_readable(run: PlannedRun) -> list[Problem]:
    """Each corpus is there and has the column, or the columns of the template."""
    problems = []
    for corpus in corpora(run.config):
        opened = run.opened[corpus.table]
        found = problem_of(opened, corpus.dataset_path) if isinstance(opened, DataError) else None
        if found and found.key == "text_column":
            fix = found.fix.replace("data.text_column", corpus.column_key)
            if corpus.table.startswith("data.mixture.") and corpus.column_key == "data.text_column":
                fix = f"set {corpus.table}.text_column, or {fix.removeprefix('set ')}"
            problems.append(run.problem(corpus.column_key, found.rule, fix))
        elif found and found.key == "columns":
            fix = found.fix.replace("data.columns", corpus.columns_key)
            fix = fix.replace("data.format", corpus.format_key)
            problems.append(run.problem(corpus.format_key, found.rule, fix))
        elif found and found.key == "label_column":
            key = "finetune.classification.label_column"
            problems.append(run.problem(key, found.rule, found.fix))
        elif found:
            problems.append(run.problem(f"{corpus.table}.{found.key}", found.rule, found.fix))
    return list(dict.fromkeys(problems))


@rule(DataError)
def idle_datasets_exist(run: PlannedRun) -> list[Problem]:
    """A name that no corpus has is wrong, too, where the corpus is not read."""
    config, problems = run.config, []
    read = {corpus.table for corpus in corpora(config)}
    for table in ("training", "validation"):
        key = f"{table}.dataset"
        if table in read or config.value(f"{table}.dataset_path") is not None:
            continue
        if unknown := check_name(config.value(key)):
            problems.append(run.problem(key, unknown.rule, unknown.fix))
    return problems


@note
def corpora_notes(run: PlannedRun) -> list[str]:
    """Names that stand for other text than they say, and names that are not looked at."""
    said = []
    for corpus in corpora(run.config):
        key = f"{corpus.table}.dataset"
        field = find_field(key)
        if corpus.dataset_path is None and corpus.dataset in STAND_INS:
            name = STAND_INS[corpus.dataset]
            said.append(
                f"{key} {corpus.dataset} is not C4 here but a stand-in: the books that are shipped, whose "
                f"own name is {name}; C4 itself is c4"
            )
        elif corpus.dataset_path is not None and field and run.config.value(key) != field.default:
            where = run.config.origin(key)
            said.append(f"{key} {corpus.dataset} ({where}) gives way to {corpus.table}.dataset_path")
    return said


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
    """A subset or a split chooses from what has several: a dataset of the hub, or splits that were saved."""
    problems = []
    for corpus in corpora(run.config):
        if isinstance(run.opened[corpus.table], DataError):
            continue  # another rule says what is wrong
        for choice in sorted({"subset", "split"} - choices_read(corpus.dataset, corpus.dataset_path)):
            key = f"{corpus.table}.dataset_{choice}"
            field = find_field(key)
            if field and run.config.value(key) != field.default:
                what = repr(corpus.dataset_path or corpus.dataset)
                fix = f"remove it, or name in place of {what} what has a {choice}, such as allenai/c4"
                problems.append(run.problem(key, f"{what} has no {choice} to choose", fix))
    return problems


@rule()
def base_corpus_is_named(run: PlannedRun) -> list[Problem]:
    """Its subset and split are of a corpus that is named."""
    validation = run.config.validation
    if not validation.enable or validation.base_corpus.named:
        return []
    fix = f"set {BASE_CORPUS}.dataset, or remove it"
    keys = [f"{BASE_CORPUS}.dataset_{choice}" for choice in ("subset", "split")]
    return [run.problem(key, "no base corpus is named", fix) for key in keys if is_set(run.config, key)]


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


@rule(DataError)
def corpus_small_enough(run: PlannedRun) -> list[Problem]:
    """A run itself tokenises no more text than data.max_inline_gb.

    Files whose hashes are remembered may be tokenised already, and a dataset of the hub says how large it is
    when it is asked: both are looked at when the run opens its corpora.
    """
    config = run.config
    limit = config.data.max_inline_gb * 1e9
    root = Path(os.path.expanduser(config.data.cache_folder)).absolute()
    largest = max(_unread_bytes(corpus, root) for corpus in run.opened.values())
    problem = too_large(largest, limit, shlex.join(_flags(config)))
    return [run.problem("data.max_inline_gb", problem.rule, problem.fix)] if problem else []


def _unread_bytes(source: Corpus | DataError, root: Path) -> int:
    """About how much text a corpus has of which no hash is remembered; 0 where that cannot be said."""
    if isinstance(source, DataError):
        return 0
    try:
        return source.n_text_bytes if unread(source, root) else 0
    except (DataError, OSError):
        return 0  # another rule says what is wrong


def _flags(config: Config) -> Iterator[str]:
    """The words that name the config, and what of it the command line changed that concerns corpora."""
    if config.job.config_file:
        yield from ("--job.config_file", config.job.config_file)
    for field in config.present_fields():
        origin, value = config.origin(field.key), config.value(field.key)
        if origin.startswith("--") and field.key.startswith((*_DATA_KEYS, *_TOKENIZER_KEYS)):
            yield f"--{field.key}={str(value).lower() if isinstance(value, bool) else value}"
