"""The manifest of a checkpoint. Imports no torch.

``step-N/manifest.json`` is written last, in a temporary folder that is then renamed to ``step-N``. A folder
with a valid manifest is therefore a complete checkpoint; all other folders are ignored by loading, retention
and "latest".
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import re
import stat
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from blake3 import blake3

from toolkit.compat import file_digest
from toolkit.config.local_paths import open_regular, read_bytes
from toolkit.config.toml_text import parse_toml
from toolkit.errors import CheckpointError, DataError, quote
from toolkit.io.json_fields import MAX_BYTES, is_size, parse_json

MANIFEST = "manifest.json"
FORMAT = "llama-toolkit checkpoint"
VERSION = 2
_READABLE = (1, 2)
"""Supported versions; version 1 hashes files with SHA-256."""

new_hash = blake3
"""Hash of new files: as strong as SHA-256, and three times as fast on one core."""
HASH = "blake3"
_HASHES: dict[str, Callable[[], Any]] = {HASH: new_hash, "sha256": hashlib.sha256}
"""Hashes that a manifest may contain."""

_NO_MANIFEST = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
"""Errors for a path that is not a file, or for a file too large to be a manifest."""

# The names of all files written by DCP. No other name is read, so no path leads outside the folder.
_FILE_NAME = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_FIELDS = {
    "format": str,
    "version": int,
    "step": int,
    "saved_at": str,
    "files": dict,
    "tensors": dict,
    "run": dict,
    "digest": str,
}
_RUN_FIELDS: dict[str, type | types.UnionType] = {
    "config": str,
    "model": dict,
    "mesh": str,
    "id": str,
    "tokenizer": str | None,
    "special_tokens": dict,
    "loader": dict,
    "model_only": bool,
    "tokens": int,
    "data_parallel_degree": int,
    "global_batch_size": int,
    "best_validation": float | int | None,
    "best_step": int | None,
    "best_of": str | None,
    "before": dict,
}
"""Fields of a manifest's ``run`` that this toolkit reads."""


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint that exists but cannot be read; it may be complete, so a run must not ignore it."""


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of ``step``."""
    return folder / f"step-{step}"


def build_manifest(
    *, step: int, files: dict[str, dict[str, Any]], tensor_count: int, tensor_bytes: int, run: dict[str, Any]
) -> dict[str, Any]:
    """Build the manifest of a checkpoint. ``files`` maps names to ``{"bytes": int, "blake3": hex}``.

    ``run`` contains the caller's configuration, mesh, tokens, data position and versions, as JSON types.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": dict(sorted(files.items())),
        "tensors": {"count": tensor_count, "bytes": tensor_bytes},
        # Round trip through JSON, so that keys and tuples are the same as for a reader.
        "run": json.loads(json.dumps(run)),
    }
    return manifest | {"digest": _digest(manifest)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and validate the manifest of the checkpoint in ``folder`` (a ``step-N``), without checking its
    files.

    Raises:
        UnreadableCheckpoint: it cannot be read, or was written by a newer toolkit.
        CheckpointError: there is none, or it is damaged, or has another format or step.
    """
    path = folder / MANIFEST
    try:
        manifest = parse_json(read_bytes(path, at_most=MAX_BYTES))
    except FileNotFoundError:
        raise CheckpointError(_absent(folder)) from None
    except OSError as error:
        kind = CheckpointError if error.errno in _NO_MANIFEST else UnreadableCheckpoint
        raise kind(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}); {ADVICE}") from None
    problem = _problem(folder, manifest)
    if problem:
        raise (UnreadableCheckpoint if _is_newer(manifest) else CheckpointError)(f"{path} {problem}")
    return manifest


def step_numbers(folder: Path) -> list[int]:
    """Return the steps with a ``step-N`` in ``folder``, valid or not, in ascending order; empty if the folder
    is missing.

    Raises:
        UnreadableCheckpoint: ``folder`` cannot be listed.
    """
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    except OSError as error:
        raise UnreadableCheckpoint(f"{folder} cannot be listed: {error.strerror}") from None
    return sorted(int(match[1]) for name in names if (match := _STEP_FOLDER.fullmatch(name)))


def committed_steps(folder: Path) -> list[int]:
    """Return the committed steps in ``folder`` in ascending order; empty if the folder is missing.

    Raises:
        UnreadableCheckpoint: ``folder`` cannot be listed, or a potential checkpoint cannot be read.
    """
    return [step for step in step_numbers(folder) if _is_committed(step_folder(folder, step))]


def invalid_steps(folder: Path) -> dict[int, str]:
    """Return the problem of each step in ``folder`` that is uncommitted or unreadable.

    Raises:
        UnreadableCheckpoint: ``folder`` cannot be listed.
    """
    problems = {}
    for step in step_numbers(folder):
        try:
            read_manifest(step_folder(folder, step))
        except CheckpointError as error:
            problems[step] = str(error)
    return problems


def check_files(folder: Path, files: dict[str, dict[str, Any]], *, verify: bool) -> list[str]:
    """Return the problems of these files of the checkpoint in ``folder``, one line per file.

    Checks existence and size; with ``verify`` also the hash, which requires reading the files.
    """
    problems = []
    for name, expected in files.items():
        try:
            status = (folder / name).stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                problems.append(f"{name} is not a regular file")
            elif size != expected["bytes"]:
                problems.append(f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
            elif verify and not _has_hash(folder / name, expected):
                problems.append(f"{name} was altered: its hash is not that in the manifest")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        except DataError as error:
            problems.append(str(error))
    return problems


ADVICE = "use another step (in a run by checkpoint.load_step), or a copy of this one"


def _is_committed(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except UnreadableCheckpoint as error:
        fix = f"make it readable, or move {folder} away to run without it"
        raise UnreadableCheckpoint(f"{error}\n  fix:  {fix}") from None
    except CheckpointError:
        return False
    return True


def _is_newer(manifest: Any) -> bool:
    """Return whether an invalid manifest has a later version of this toolkit's format."""
    ours = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    return ours and isinstance(manifest.get("version"), int) and manifest["version"] > VERSION


def _absent(folder: Path) -> str:
    if not folder.is_dir():
        return f"no checkpoint at {folder}: there is no such folder"
    subfolders = {path.parent for path in folder.glob("*/step-*")}
    for parent in (folder, *sorted(subfolders)):
        if steps := committed_steps(parent):
            return (
                f"{folder} is not a checkpoint but a folder of checkpoints: choose one, "
                f"for example {step_folder(parent, steps[-1])}"
            )
    if (folder / ".metadata").exists():
        return (
            f"{folder} has no {MANIFEST}: it is a DCP folder of another program, or was never "
            "committed; only checkpoints that this toolkit wrote can be verified and loaded"
        )
    return f"{folder} is not a checkpoint: it has no {MANIFEST}"


def _problem(folder: Path, manifest: Any) -> str | None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"is not a manifest of this toolkit (its format is not {FORMAT!r})"
    if manifest.get("version") not in _READABLE:
        return f"has version {quote(manifest.get('version'))}; this toolkit reads versions up to {VERSION}"
    for field, kind in _FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            return f"is damaged: {field} is missing or not a {kind.__name__}; {ADVICE}"
    if manifest["digest"] != _digest({key: value for key, value in manifest.items() if key != "digest"}):
        return f"was altered: its digest does not match its content; {ADVICE}"
    unknown = [name for name in manifest["files"] if not _FILE_NAME.fullmatch(name)]
    if unknown:
        return f"lists files that no checkpoint has: {', '.join(map(repr, unknown[:3]))}"
    if not all(_is_file_entry(entry) for entry in manifest["files"].values()):
        return f"is damaged: a file has no size or no known hash; {ADVICE}"
    if not all(map(is_size, (manifest["step"], *map(manifest["tensors"].get, ("count", "bytes"))))):
        return f"is damaged: its step, or the count or bytes of its tensors, is not a number; {ADVICE}"
    run = manifest["run"]
    for field, expected in _RUN_FIELDS.items():
        if field in run and not _is_a(run[field], expected):
            return f"is damaged: {field} of its run is {quote(run[field])}; {ADVICE}"
    start = run.get("schedule_start", 0)  # negative if the step, but not the schedule, was excluded
    if type(start) is not int or not is_size(abs(start)):
        return f"is damaged: schedule_start of its run is {quote(start)}; {ADVICE}"
    if "base" in run and not _is_base(run["base"]):
        return f"is damaged: base of its run is {quote(run['base'])}; {ADVICE}"
    try:
        saved_settings(run)
    except (ValueError, RecursionError) as error:
        return f"is damaged: the configuration of its run is not TOML ({error}); {ADVICE}"
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match and int(match[1]) != manifest["step"]:
        return f"is of step {manifest['step']}: the folder was renamed or its files were mixed up"
    return None


def saved_settings(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration in a manifest's ``run``, by dotted key."""
    return _settings(run.get("config", ""))


def parts_to_exclude(exclude: Sequence[str], run: Mapping[str, Any]) -> list[str]:
    """Return the parts in checkpoint.exclude_from_loading that the run's own checkpoint excludes too.

    Parts that were already excluded when the run saved (``run`` in the manifest) are loaded. The same command
    can therefore resume from its own checkpoints.
    """
    before = saved_settings(run).get("checkpoint.exclude_from_loading")
    return [part for part in exclude if not isinstance(before, list) or part not in before]


@functools.lru_cache(maxsize=8)  # the checkpoints of a run have the same configuration
def _settings(config: str) -> dict[str, Any]:
    return dotted(config)


def _is_a(value: Any, expected: type | types.UnionType) -> bool:
    """Return whether a JSON value has the expected type; integers must not be boolean, negative or too
    large."""
    if isinstance(value, bool) or not isinstance(value, expected):
        return isinstance(value, bool) and expected is bool
    return is_size(value) if expected is int else True


def _is_base(base: Any) -> bool:
    """Return whether ``base`` is a valid description of an adapter's base model."""
    has_fields = isinstance(base, dict) and {"place", "fingerprint"} <= base.keys()
    return has_fields and all(isinstance(value, str) for value in base.values())


def _is_file_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and is_size(entry.get("bytes")) and _hash_of(entry) is not None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash_of(entry: Mapping[str, Any]) -> str | None:
    """Return the name of the hash function in a file's entry."""
    return next((name for name in _HASHES if isinstance(entry.get(name), str)), None)


def _has_hash(path: Path, entry: Mapping[str, Any]) -> bool:
    name = _hash_of(entry)
    assert name is not None, "the manifest was read"
    with open_regular(path) as file:
        return file_digest(file, _HASHES[name]).hexdigest() == entry[name]


def dotted(toml: str) -> dict[str, Any]:
    """Return the values of a TOML document by dotted key."""

    def flatten(table: dict[str, Any], prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in table.items():
            values |= (
                flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
            )
        return values

    return flatten(parse_toml(toml), "")
