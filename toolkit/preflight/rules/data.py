"""Rules for output folders, and for the corpora of training, mixtures and validation."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.config.schema import find_field
from toolkit.config.types import UnknownValue
from toolkit.data.build import corpora
from toolkit.data.cache_folder import local_cache
from toolkit.data.content_hash import too_large, unread
from toolkit.data.corpus import Corpus
from toolkit.data.sources import EMBEDDED, STAND_INS, check_name, problem_of
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
_RUN_FILES = ("metrics.jsonl", "heartbeat.json", "forecast.json", "run.lock")
_FolderOf = Callable[[PlannedRun, Any], str | None]
_TOKENIZER_KEYS = ("model.tokenizer_path", "model.hf_assets_path")


@rule()
def folders_writable(run: PlannedRun) -> list[Problem]:
    """Check that the run can create the folders to which it writes."""
    problems: dict[Path, Problem] = {}
    for key, folder_of in _FOLDERS.items():
        with suppress(UnknownValue):  # the others are still checked
            if (folder := folder_of(run, run.config.value(key))) is None:
                continue
            rule, fix = _unusable(folder)
            path = expand_user(folder).absolute()
            if rule and problems.keys().isdisjoint([path, *path.parents]):  # an outer folder is reported
                problems[path] = run.problem(key, rule, fix)
    return list(problems.values())


def _cache(run: PlannedRun, folder: str) -> str | None:
    cache = local_cache(folder)
    return None if (cache / "tokens").is_dir() else str(cache)  # an existing cache may have all tokens


def _checkpoints(run: PlannedRun, folder: str) -> str | None:
    local = run.config.checkpoint.enable and isinstance(run.checkpoints, Path)
    return str(run.checkpoints) if local else None


def _compiled(run: PlannedRun, folder: str) -> str | None:
    overridden = "TORCHINDUCTOR_CACHE_DIR" in os.environ
    return folder if run.config.compile.enable and not overridden else None


def _inside(is_made: Callable[[PlannedRun], bool]) -> _FolderOf:
    """Return a function that returns a folder inside the dump folder, if the run creates that folder."""
    return lambda run, name: str(expand_user(name, inside=run.dump_folder)) if is_made(run) else None


def _folder_of_file(run: PlannedRun, file: str | None) -> str | None:
    return str(expand_user(file, inside=run.dump_folder).parent) if file else None


_FOLDERS: dict[str, _FolderOf] = {
    "job.dump_folder": lambda run, folder: folder,
    "data.cache_folder": _cache,
    "checkpoint.folder": _checkpoints,
    "metrics.save_tb_folder": _inside(lambda run: run.config.metrics.enable_tensorboard),
    "profiling.save_traces_folder": _inside(lambda run: run.config.profiling.enable_profiling),
    "profiling.save_memory_snapshot_folder": _inside(lambda run: run.config.profiling.enable_memory_snapshot),
    "comm.save_traces_folder": _inside(lambda run: run.world_size > 1),
    "metrics.prometheus_file": _folder_of_file,
    "job.save_config_file": _folder_of_file,
    "compile.cache_folder": _compiled,
}
"""Keys of folders → function from run and key value to the folder, or None if the run does not write to
it."""


@rule()
def saved_config_name_usable(run: PlannedRun) -> list[Problem]:
    """Check that the saved copy of the config does not overwrite another file or folder of the run."""
    key = "job.save_config_file"
    if not (name := run.config.job.save_config_file):
        return []
    path = expand_user(name, inside=run.dump_folder)
    if path.is_dir():
        return [run.problem(key, f"{path} is a folder", "use a file name, such as my_config.toml")]
    if path.name in _RUN_FILES and path.parent.resolve() == run.dump_folder.resolve():
        return [run.problem(key, "is a file that the run itself writes", "use another name")]
    return []


def _unusable(folder: str) -> tuple[str, str]:
    """Return why a folder cannot be created or written to, and the fix, or empty strings."""
    path = expand_user(folder).absolute()
    if not folder:
        return "the folder name is empty", 'set a folder; "." is the current one'
    if str(expand_user(folder)).startswith("~"):
        return f"there is no user {Path(folder).parts[0][1:]} whose home folder ~ could mean", "set a folder"
    while not os.path.lexists(path):
        path = path.parent
    if not path.is_dir():
        return f"{path} is not a folder", "use another folder"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{path} is not writable", "use another folder, or give this user permission to write there"
    return "", ""


@rule(DataError)
def corpus_readable(run: PlannedRun) -> list[Problem]:
    """Check that each corpus exists and has the needed columns."""
    try:
        of_run = corpora(run.config)
    except UnknownValue:
        return list(_missing(run))
    problems = []
    for corpus in of_run:
        opened, chosen_by = run.opened[corpus.table], _chosen_by(corpus.table)
        found = problem_of(opened, corpus.dataset_path) if isinstance(opened, DataError) else None
        if found and corpus.dataset_path is None and corpus.dataset in EMBEDDED:
            fix = f"set {corpus.table}.dataset_path: the included {corpus.dataset} is plain text"
            found = replace(found, fix=fix if found.key != "columns" else f"{fix}; or another data.format")
        if found and found.key == "text_column":
            fix = found.fix.replace("data.text_column", corpus.column_key)
            if corpus.table.startswith("data.mixture.") and corpus.column_key == "data.text_column":
                fix = f"set {corpus.table}.text_column, or {fix.removeprefix('set ')}"
            problems.append(run.problem(corpus.column_key, found.rule, fix, *chosen_by))
        elif found and found.key == "columns":
            fix = found.fix.replace("data.columns", corpus.columns_key)
            fix = fix.replace("data.format", corpus.format_key)
            problems.append(run.problem(corpus.format_key, found.rule, fix, *chosen_by))
        elif found and found.key == "label_column":
            key = "finetune.classification.label_column"
            problems.append(run.problem(key, found.rule, found.fix, *chosen_by))
        elif found:
            key = f"{corpus.table}.{found.key}"
            problems.append(run.problem(key, found.rule, found.fix, *chosen_by))
    return list(dict.fromkeys(problems))


def _missing(run: PlannedRun) -> Iterator[Problem]:
    """Check only whether corpora exist, because it is unknown how to read them."""
    for table in ("training", "validation"):
        with suppress(UnknownValue):
            options = run.config.value(table)
            if not options.enable if table == "validation" else run.config.data.mixture:
                continue
            if options.dataset_path is None:
                found = check_name(options.dataset)
            else:
                found = _not_found(options.dataset_path, options.dataset_split)
            if found:
                key = f"{table}.{found.key}"
                yield run.problem(key, found.rule, found.fix, *_chosen_by(table))


def _not_found(path: str, split: str) -> Problem | None:
    from toolkit.data.find_files import find

    try:
        find(path, split=split)
    except DataError as error:
        return problem_of(error, path)
    return None


def _chosen_by(table: str) -> tuple[str, str]:
    """Return the keys that choose the corpus of a table."""
    return f"{table}.dataset_path", f"{table}.dataset"


@rule(DataError)
def unused_dataset_names_exist(run: PlannedRun) -> Iterator[Problem]:
    """Check the names of corpora, including those that the run does not read."""
    config = run.config
    read = {corpus.table for corpus in corpora(config)}
    for table in ("training", "validation"):
        key = f"{table}.dataset"
        if table in read or config.value(f"{table}.dataset_path") is not None:
            continue
        if unknown := check_name(config.value(key)):
            yield run.problem(key, unknown.rule, unknown.fix)


@note
def corpora_notes(run: PlannedRun) -> Iterator[str]:
    """Note names that are aliases or are overridden, and files that are skipped."""
    for corpus in corpora(run.config):
        opened = run.opened[corpus.table]
        for skipped in () if isinstance(opened, DataError) else opened.notes:
            yield f"{corpus.table}.dataset_path {skipped}"
        key = f"{corpus.table}.dataset"
        field = find_field(key)
        if corpus.dataset_path is None and corpus.dataset in STAND_INS:
            name = STAND_INS[corpus.dataset]
            yield (
                f"{key} {corpus.dataset} is not C4 here but a stand-in, the included books (also named "
                f"{name}); the name of C4 itself is c4"
            )
        elif corpus.dataset_path is not None and field and run.config.value(key) != field.default:
            where = run.config.origin(key)
            yield f"{key} {corpus.dataset} ({where}) is overridden by {corpus.table}.dataset_path"


@rule(DataError)
def corpus_small_enough(run: PlannedRun) -> list[Problem]:
    """Check that a run does not have to tokenize more text than data.max_inline_gb.

    Files with known hashes may already be tokenized, and the size of a dataset of the Hub is unknown until it
    is opened. Both are checked when the run opens its corpora."""
    config = run.config
    limit = config.data.max_inline_gb * 1e9
    root = local_cache(config.data.cache_folder)
    cached = [table for table in run.opened if table != "training" or not config.data.streaming]
    sizes = {table: _unread_bytes(run.opened[table], root) for table in cached}
    largest = max(sizes, key=sizes.__getitem__, default="training")
    size = sizes.get(largest, 0)
    problem = too_large(size, limit, shlex.join(_flags(config)) if size > limit else "")
    if problem is None:
        return []
    return [run.problem("data.max_inline_gb", problem.rule, problem.fix, *_chosen_by(largest))]


def _unread_bytes(source: Corpus | DataError, root: Path) -> int:
    """Estimate the bytes of a corpus without a known hash; 0 if the size is unknown."""
    if isinstance(source, DataError):
        return 0
    try:
        return source.n_text_bytes if unread(source, root) else 0
    except (DataError, OSError):
        return 0  # another rule reports it


def _flags(config: Config) -> Iterator[str]:
    """Yield the flags for the config file and for command-line overrides that affect corpora."""
    if config.job.config_file:
        yield from ("--job.config_file", config.job.config_file)
    for field in config.present_fields():
        origin, value = config.origin(field.key), config.value(field.key)
        if origin.startswith("--") and field.key.startswith((*_DATA_KEYS, *_TOKENIZER_KEYS)):
            yield f"--{field.key}={str(value).lower() if isinstance(value, bool) else value}"
