"""Folders of weights that were written here and go to object storage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.errors import CheckpointError, DataError
from toolkit.storage.remote_path import RemotePath

_MARKS = ("params.json", "adapter_config.json", "config.json", "manifest.json")
"""Files without one of which no folder is read as weights."""
_LAST = ("model.safetensors.index.json", *_MARKS)
_CHUNK = 16 << 20


def upload_folder(folder: Path, out: RemotePath, *, replace: bool) -> None:
    """Bring the files in ``folder`` to ``out``: complete, or without the file by which it would be read.
    Where nothing is to be replaced, nothing is left of an upload that fails or is stopped.

    Raises:
        DataError: something is there already that is not to be replaced, or the store cannot be used.
    """
    if out.is_dir():
        if not replace:
            raise DataError(f"{out} is there already: name another folder, or delete it")
        out.remove_tree(first=_LAST)
    paths = sorted(folder.iterdir(), key=lambda path: (path.name in _LAST, _rank(path.name), path.name))
    try:
        for path in paths:
            with path.open("rb") as content, (out / path.name).open("wb") as file:
                while chunk := content.read(_CHUNK):
                    file.write(chunk)
    except BaseException:
        with suppress(DataError):
            for path in paths if not replace else ():
                (out / path.name).unlink()
        raise


def withdraw(out: RemotePath) -> None:
    """Delete the files by which a folder at ``out`` would be read, before another takes its place."""
    for name in _LAST:
        (out / name).unlink()


def is_whole(out: RemotePath) -> bool:
    """Say if a folder that was brought to ``out`` is there, complete."""
    return any((out / name).is_file() for name in _MARKS)


@contextmanager
def staged(out: RemotePath) -> Iterator[Path]:
    """A folder of this machine that is to be written, and then goes to ``out``; nothing of it stays here.

    Raises:
        DataError: as :func:`upload_folder`.
        CheckpointError: it could not be written here.
    """
    with tempfile.TemporaryDirectory(prefix="upload-") as folder:
        work = Path(folder, out.name or "out")
        try:
            yield work
        except CheckpointError as error:
            said = str(error).partition("\n")[0]  # without what would be left to go on from
            fix = f"set TMPDIR to a folder with room for all of {out}"
            raise CheckpointError(f"{said}\n  fix:  {fix}") from None
        upload_folder(work, out, replace=False)


def _rank(name: str) -> int:
    return _LAST.index(name) if name in _LAST else 0
