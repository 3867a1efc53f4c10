"""The manifest, which makes a folder a checkpoint. Imports no torch.

``step-N/manifest.json`` is written last, inside a temporary folder that one rename then turns into
``step-N``. A folder with a sound manifest therefore holds a complete checkpoint, and only such folders
exist for loading, for retention and for "latest".
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
_READ = (1, 2)
"""Versions that are read: before 2 files were hashed with SHA-256."""

new_hash = blake3
"""Hashes what is written: as strong as SHA-256, and on one core three times as fast."""
HASH = "blake3"
_HASHES: dict[str, Callable[[], Any]] = {HASH: new_hash, "sha256": hashlib.sha256}
"""Hashes that a manifest may name."""

_NO_MANIFEST = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)
"""Errors of reading a file that say that it is none, or too large to be a manifest."""

# Everything that DCP writes has one of these names; no other may be read, so no path can escape.
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
"""Entries of a manifest about its run that this toolkit reads."""


class UnreadableCheckpoint(CheckpointError):
    """A checkpoint that is there and cannot be read: it may be whole, and no run may go on without it."""


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return folder / f"step-{step}"


def build_manifest(
    *, step: int, files: dict[str, dict[str, Any]], tensor_count: int, tensor_bytes: int, run: dict[str, Any]
) -> dict[str, Any]:
    """The manifest of a checkpoint: ``files`` maps names to ``{"bytes": int, "blake3": hex}``.

    ``run`` is the caller's own: configuration, mesh, tokens, data position, versions; JSON types only.
    """
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "files": dict(sorted(files.items())),
        "tensors": {"count": tensor_count, "bytes": tensor_bytes},
        # through JSON once, so that keys and tuples are already what a reader will see
        "run": json.loads(json.dumps(run)),
    }
    return manifest | {"digest": _digest(manifest)}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of the checkpoint in ``folder`` (a ``step-N``).

    Raises:
        UnreadableCheckpoint: it cannot be read, or is of a newer toolkit.
        CheckpointError: there is none, or it is damaged, of another format, or not of this step; the
            message says which. The files that it lists are not looked at.
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


def named_steps(folder: Path) -> list[int]:
    """Steps that have a ``step-N`` in ``folder``, whatever is in it, ascending; no folder means none.

    Raises:
        UnreadableCheckpoint: ``folder`` cannot be listed.
    """
    try:
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    except OSError as error:
        raise UnreadableCheckpoint(f"{folder} cannot be listed: {error.strerror}") from None
    return sorted(int(match[1]) for name in names if (match := _STEP_FOLDER.fullmatch(name)))


def committed_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints in ``folder``, ascending; no folder means none.

    Raises:
        UnreadableCheckpoint: ``folder`` cannot be listed, or what may be a checkpoint cannot be read.
    """
    return [step for step in named_steps(folder) if _is_committed(step_folder(folder, step))]


def unsound_steps(folder: Path) -> dict[int, str]:
    """Steps that have a folder in ``folder`` but no committed checkpoint in it, or one that cannot be read,
    with what is wrong.

    Raises:
        UnreadableCheckpoint: ``folder`` cannot be listed.
    """
    found = {}
    for step in named_steps(folder):
        try:
            read_manifest(step_folder(folder, step))
        except CheckpointError as error:
            found[step] = str(error)
    return found


def check_files(folder: Path, files: dict[str, dict[str, Any]], *, verify: bool) -> list[str]:
    """Problems of these files of the checkpoint in ``folder``, one line a file.

    Existence and size; with ``verify`` the hash too, which reads them.
    """
    problems = []
    for name, expected in files.items():
        try:
            found = (folder / name).stat()
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                problems.append(f"{name} is no regular file")
            elif size != expected["bytes"]:
                problems.append(f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
            elif verify and not _has_hash(folder / name, expected):
                problems.append(f"{name} was altered: its hash is not the one of the manifest")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        except DataError as error:
            problems.append(str(error))
    return problems


ADVICE = "take another step (in a run by checkpoint.load_step), or a copy of this one"


def _is_committed(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except UnreadableCheckpoint as error:
        fix = f"make it readable here, or move {folder} away: then the run goes on without it"
        raise UnreadableCheckpoint(f"{error}\n  fix:  {fix}") from None
    except CheckpointError:
        return False
    return True


def _is_newer(manifest: Any) -> bool:
    """Say if a manifest, of which something is wrong, is of this toolkit's format and a later version."""
    ours = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    return ours and isinstance(manifest.get("version"), int) and manifest["version"] > VERSION


def _absent(folder: Path) -> str:
    if not folder.is_dir():
        return f"no checkpoint at {folder}: there is no such folder"
    of_a_run = {path.parent for path in folder.glob("*/step-*")}
    for place in (folder, *sorted(of_a_run)):
        if steps := committed_steps(place):
            return (
                f"{folder} is not a checkpoint but a folder of them: name one, "
                f"for example {step_folder(place, steps[-1])}"
            )
    if (folder / ".metadata").exists():
        return (
            f"{folder} has no {MANIFEST}: a DCP folder of another program, or one that was never "
            "committed; only checkpoints that this toolkit wrote can be verified and loaded"
        )
    return f"{folder} is not a checkpoint: it has no {MANIFEST}"


def _problem(folder: Path, manifest: Any) -> str | None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"is not a manifest of this toolkit (its format is not {FORMAT!r})"
    if manifest.get("version") not in _READ:
        return f"has version {quote(manifest.get('version'))}; this toolkit reads versions up to {VERSION}"
    for field, kind in _FIELDS.items():
        if not isinstance(manifest.get(field), kind):
            return f"is damaged: {field} is missing or not a {kind.__name__}; {ADVICE}"
    if manifest["digest"] != _digest({key: value for key, value in manifest.items() if key != "digest"}):
        return f"was altered: its digest does not fit its content; {ADVICE}"
    strange = [name for name in manifest["files"] if not _FILE_NAME.fullmatch(name)]
    if strange:
        return f"lists files that no checkpoint has: {', '.join(map(repr, strange[:3]))}"
    if not all(_describes_file(entry) for entry in manifest["files"].values()):
        return f"is damaged: a file without its size or a hash that is known; {ADVICE}"
    if not all(map(is_size, (manifest["step"], *map(manifest["tensors"].get, ("count", "bytes"))))):
        return f"is damaged: its step, or the number of its tensors or their bytes, is no number; {ADVICE}"
    run = manifest["run"]
    for field, expected in _RUN_FIELDS.items():
        if field in run and not _is_a(run[field], expected):
            return f"is damaged: {field} of its run is {quote(run[field])}; {ADVICE}"
    start = run.get("schedule_start", 0)  # below 0 where the step was left out and the schedule was not
    if type(start) is not int or not is_size(abs(start)):
        return f"is damaged: schedule_start of its run is {quote(start)}; {ADVICE}"
    if "base" in run and not _names_base(run["base"]):
        return f"is damaged: base of its run is {quote(run['base'])}; {ADVICE}"
    try:
        saved_settings(run)
    except (ValueError, RecursionError) as error:
        return f"is damaged: the configuration of its run is no TOML ({error}); {ADVICE}"
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match and int(match[1]) != manifest["step"]:
        return f"is of step {manifest['step']}: the folder was renamed or its files were mixed up"
    return None


def saved_settings(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of the configuration that a manifest's ``run`` holds, by dotted key."""
    return _settings(run.get("config", ""))


def left_out(asked: Sequence[str], run: Mapping[str, Any]) -> list[str]:
    """The parts that are not loaded of a run's own checkpoint, of whose manifest ``run`` is a part, where
    those ``asked`` for are named by checkpoint.exclude_from_loading: not what the run had left out before it
    was saved. So the same command goes on from what it has saved."""
    before = saved_settings(run).get("checkpoint.exclude_from_loading")
    return [part for part in asked if not isinstance(before, list) or part not in before]


@functools.lru_cache(maxsize=8)  # the checkpoints of a run have the same one
def _settings(config: str) -> dict[str, Any]:
    return dotted(config)


def _is_a(value: Any, expected: type | types.UnionType) -> bool:
    """Compare a value of JSON with its type: no number is true or false, none is negative or immense."""
    if isinstance(value, bool) or not isinstance(value, expected):
        return isinstance(value, bool) and expected is bool
    return is_size(value) if expected is int else True


def _names_base(base: Any) -> bool:
    """Say if this tells of the model that an adapter was trained on."""
    named = isinstance(base, dict) and {"place", "fingerprint"} <= base.keys()
    return named and all(isinstance(value, str) for value in base.values())


def _describes_file(entry: Any) -> bool:
    return isinstance(entry, dict) and is_size(entry.get("bytes")) and _hash_of(entry) is not None


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash_of(entry: Mapping[str, Any]) -> str | None:
    """The name of the hash that a file's entry gives."""
    return next((name for name in _HASHES if isinstance(entry.get(name), str)), None)


def _has_hash(path: Path, entry: Mapping[str, Any]) -> bool:
    name = _hash_of(entry)
    assert name is not None, "the manifest was read"
    with open_regular(path) as file:
        return file_digest(file, _HASHES[name]).hexdigest() == entry[name]


def dotted(toml: str) -> dict[str, Any]:
    """The values of a TOML document by dotted key."""

    def values(table: dict[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in table.items():
            found |= (
                values(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
            )
        return found

    return values(parse_toml(toml), "")
