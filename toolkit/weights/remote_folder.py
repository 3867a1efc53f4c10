"""Upload of weight folders to object storage."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolkit.errors import CheckpointError, DataError
from toolkit.storage.remote_path import RemotePath

_MARKS = ("params.json", "adapter_config.json", "config.json", "manifest.json")
"""Files that mark a folder as weights; without them it is not recognized."""
_LAST = ("model.safetensors.index.json", *_MARKS)
_CHUNK = 16 << 20


def upload_folder(folder: Path, out: RemotePath, *, replace: bool) -> None:
    """Upload the files in ``folder`` to ``out``; the files that make it readable come last. Without
    ``replace``, a failed or interrupted upload is removed.

    Raises:
        DataError: ``out`` exists and ``replace`` is False, or the store cannot be used.
    """
    if out.is_dir():
        if not replace:
            raise DataError(f"{out} exists: choose another folder, or delete it")
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
    """Delete the files that make a folder at ``out`` readable, before it is replaced."""
    for name in _LAST:
        (out / name).unlink()


def is_complete(out: RemotePath) -> bool:
    """Return whether ``out`` is a completely uploaded folder."""
    return any((out / name).is_file() for name in _MARKS)


@contextmanager
def staged(out: RemotePath) -> Iterator[Path]:
    """Yield a temporary local folder to write to, then upload it to ``out``.

    Raises:
            DataError: as in :func:`upload_folder`.
        CheckpointError: the local folder could not be written.
    """
    with tempfile.TemporaryDirectory(prefix="upload-") as folder:
        work = Path(folder, out.name or "out")
        try:
            yield work
        except CheckpointError as error:
            reason = str(error).partition("\n")[0]  # without the advice to resume
            fix = f"set TMPDIR to a folder with enough space for {out}"
            raise CheckpointError(f"{reason}\n  fix:  {fix}") from None
        upload_folder(work, out, replace=False)


def _rank(name: str) -> int:
    return _LAST.index(name) if name in _LAST else 0
