"""Tokenised corpora on disk: built once, by all cores, then mapped into memory by everyone.

    <cache folder>/tokens/<key>/tokens.bin    the ids end to end, uint16 or uint32
                               /offsets.bin   int64: where each document begins, and the end
                               /meta.json     counts, type, key
    <cache folder>/tokens/<key>.building/     a build in progress, or what a killed one left
    <cache folder>/tokens/<key>.lock          held (flock) by the process that builds
    <cache folder>/hashes/                    content hashes, so that a second start reads no text

The key is the SHA-256 of the files' contents in order, the tokenizer's fingerprint, the column and
``FORMAT``. A folder under its final name is complete: it gets there by one atomic rename after fsync. The
kernel releases the lock of a process that dies, however it dies; whoever takes the lock next owns the
``.building`` folder and removes it; a build also removes those of other corpora that nobody builds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from toolkit.data.progress import Progress
from toolkit.data.sources import PIECE_BYTES, Source, is_json
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.workers import Encoded, encode_all
from toolkit.durable import sync_file, sync_folder
from toolkit.errors import DataError
from toolkit.hardware import cores

FORMAT = 1  # raise it when pieces are cut, or documents are framed, in another way
ALONE_BYTES = 16 << 20  # of text: up to here helpers would hardly be under way before one process is done
SETTLED_SECONDS = 2.0  # a younger file could change again within its time stamp's resolution


@dataclass(frozen=True, eq=False)
class TokenCache:
    """A tokenised corpus, mapped into memory.

    ``tokens`` (n_tokens,) uint16 or uint32, the documents end to end; ``offsets`` (n_documents + 1,)
    int64. ``fingerprint`` names the content, whatever the place. Pickles as its folder's name.
    """

    folder: Path
    fingerprint: str
    n_documents: int
    n_tokens: int
    tokens: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)

    def __reduce__(self) -> tuple:
        return open_cache, (self.folder,)


def tokenized(
    source: Source,
    tokenizer: Tokenizer,
    *,
    cache_folder: str | Path,
    progress: bool = True,
    processes: int = 0,
) -> TokenCache:
    """The tokenised ``source``: opened where it has been built before, else built now.

    Any number of processes may call this at once: one builds, the others wait. ``progress`` shows on
    stderr what is going on. ``processes`` 0 is one a core, or none but this one for a small corpus.

    Raises:
        DataError: unreadable, undecodable or empty corpus; a cache folder that cannot be written.
    """
    root = Path(cache_folder).expanduser().absolute()
    key = _key(source, tokenizer, root, progress)
    folder = root / "tokens" / key[:32]
    with _cache_errors(root):
        if (cache := _open_if_sound(folder, progress)) is not None:
            return cache
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_suffix(".lock"), progress):
            if (cache := _open_if_sound(folder, progress)) is not None:
                return cache
            _remove_leftovers(folder.parent)
            _build(source, tokenizer, key, folder, progress, processes or _process_count(source))
    return open_cache(folder)


def open_cache(folder: Path) -> TokenCache:
    """Map a built cache. Raises FileNotFoundError, or DataError where a file is not as meta.json says."""
    meta = json.loads((folder / "meta.json").read_text())
    n_tokens, n_documents, dtype = (meta["tokens"], meta["documents"], np.dtype(meta["dtype"]))
    expected = {"tokens.bin": n_tokens * dtype.itemsize, "offsets.bin": (n_documents + 1) * 8}
    for name, size in expected.items():
        actual = (folder / name).stat().st_size
        if actual != size:
            raise DataError(f"{folder / name} is damaged: it has {actual:,} bytes and should have {size:,}")
    tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype, "r"))  # plain views: slices cost less
    offsets = np.asarray(np.memmap(folder / "offsets.bin", np.int64, "r"))
    if offsets[0] != 0 or offsets[-1] != n_tokens:
        raise DataError(f"{folder / 'offsets.bin'} is damaged: it does not span the {n_tokens:,} tokens")
    return TokenCache(folder, meta["fingerprint"], n_documents, n_tokens, tokens, offsets)


def _open_if_sound(folder: Path, progress: bool) -> TokenCache | None:
    try:
        return open_cache(folder)
    except FileNotFoundError:
        if folder.exists():
            _say(progress, f"{folder} lacks a file; tokenising again")
    except (DataError, ValueError, KeyError, TypeError) as error:
        _say(progress, f"{error}; tokenising again")
    return None


def _say(progress: bool, message: str) -> None:
    if progress:
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _cache_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the token cache {root} cannot be used: {error}\n  fix:  set data.cache_folder to a folder on "
            f"a local file system that this user can write and that has room (about 0.6 bytes a byte of text)"
        ) from error


@contextlib.contextmanager
def _lock(path: Path, progress: bool) -> Iterator[None]:
    """Hold an exclusive flock. The file stays: removing it would let two holders in."""
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            _say(progress, f"waiting for {holder} to finish tokenising this corpus ({path.with_suffix('')})")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _remove_leftovers(tokens: Path) -> None:
    """Remove what killed builds of other corpora left: theirs is a lock that nobody holds."""
    for leftover in tokens.glob("*.building"):
        with open(leftover.with_suffix(".lock"), "a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover)


def _key(source: Source, tokenizer: Tokenizer, root: Path, progress: bool) -> str:
    kinds = ["json" if is_json(path) else "text" for path in source.files]
    column = source.text_column if "json" in kinds else None
    parts = [FORMAT, list(zip(kinds, _content_hashes(source, root, progress), strict=True)), column]
    return hashlib.sha256(json.dumps([*parts, tokenizer.fingerprint]).encode()).hexdigest()


def _stamps(source: Source) -> list[tuple[int, ...]]:
    """What changes when a file is written: size, and times of modification and of status change."""
    try:
        stats = [path.stat() for path in source.files]
    except OSError as error:
        raise DataError(f"the corpus cannot be read: {error}") from error
    return [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]


def _content_hashes(source: Source, root: Path, progress: bool) -> list[str]:
    """SHA-256 of each file, remembered under the list of their paths while their stamps stay the same."""
    paths = [str(path) for path in source.files]
    record = root / "hashes" / f"{hashlib.sha256(json.dumps(paths).encode()).hexdigest()[:32]}.json"
    stamps = [list(stamp) for stamp in _stamps(source)]
    known: dict[str, list] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(record.read_text())
    new = [path for path, stamp in zip(paths, stamps, strict=True) if known.get(path, [None])[0] != stamp]
    if new:
        size = sum(stamp[0] for path, stamp in zip(paths, stamps, strict=True) if path in set(new))
        if size > 1 << 30:
            _say(
                progress,
                f"hashing {len(new):,} files, {size / 1e9:.1f} GB, to see whether they are tokenised",
            )
        settled = (time.time() - SETTLED_SECONDS) * 1e9
        with ThreadPoolExecutor(min(8, cores())) as threads:
            found = dict(zip(new, threads.map(_file_hash, new), strict=True))
        known = {
            path: [stamp, found.get(path) or known[path][1]]
            for path, stamp in zip(paths, stamps, strict=True)
        }
        # A read-only cache folder is no reason to stop: it may hold the tokens already.
        with contextlib.suppress(OSError):
            _remember(record, {path: entry for path, entry in known.items() if max(entry[0][1:]) < settled})
    return [known[path][1] for path in paths]


def _remember(record: Path, entries: dict[str, list]) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    temporary = record.with_name(f"{record.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(json.dumps(entries))
    os.replace(temporary, record)


def _file_hash(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _process_count(source: Source) -> int:
    # Compressed text is about three times as long as its file.
    n_bytes = sum(path.stat().st_size * (3 if path.suffix == ".gz" else 1) for path in source.files)
    return 1 if n_bytes <= ALONE_BYTES else max(1, min(cores(), n_bytes // PIECE_BYTES))


def _build(
    source: Source, tokenizer: Tokenizer, key: str, folder: Path, progress: bool, processes: int
) -> None:
    """Write the cache under a temporary name and commit it. The caller holds the lock."""
    building = folder.with_suffix(".building")
    for leftover in (building, folder):  # of a killed build; a damaged cache
        if leftover.exists():
            shutil.rmtree(leftover)
    building.mkdir()
    stamps = _stamps(source)
    dtype = "uint16" if tokenizer.n_words <= 1 << 16 else "uint32"
    try:
        with Progress(source.name, source.n_bytes, processes, shown=progress) as bar:
            pieces = encode_all(source.pieces(), source.text_column, tokenizer, dtype, processes=processes)
            with contextlib.closing(pieces):
                n_tokens, n_documents = _write(pieces, building, bar)
        if n_documents == 0:
            files = "file" if len(source.files) == 1 else f"{len(source.files):,} files"
            raise DataError(
                f"the corpus {source.name} holds no text in its {files}\n"
                "  fix:  name files that have some in training.dataset_path (validation.dataset_path)"
            )
        if _stamps(source) != stamps:
            raise DataError(f"the corpus {source.name} changed while it was tokenised\n  fix:  start again")
        meta = {
            "format": FORMAT,
            "fingerprint": key,
            "tokens": n_tokens,
            "documents": n_documents,
            "dtype": dtype,
        }
        with open(building / "meta.json", "wb") as file:
            file.write(json.dumps(meta | {"corpus": source.name}).encode())
            sync_file(file)
        sync_folder(building)
        os.rename(building, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write(pieces: Iterator[Encoded], building: Path, bar: Progress) -> tuple[int, int]:
    """Stream pieces to disk; returns the number of tokens and of documents."""
    n_tokens = n_documents = 0
    unfinished = 0  # tokens so far of a document that the next piece goes on with
    with open(building / "tokens.bin", "wb") as tokens, open(building / "offsets.bin", "wb") as offsets:
        offsets.write(bytes(8))
        for piece in pieces:
            tokens.write(piece.tokens.data)
            lengths = piece.lengths.copy()
            if not piece.opens:
                lengths[0] += unfinished
            if not piece.closes:
                unfinished, lengths = int(lengths[-1]), lengths[:-1]
            lengths = lengths[lengths > 0]  # a tokenizer without BOS and EOS may have nothing for a text
            ends = n_tokens + np.cumsum(lengths)
            offsets.write(ends.data)
            n_tokens, n_documents = (int(ends[-1]) if len(ends) else n_tokens, n_documents + len(ends))
            bar.advance(piece.n_file_bytes, n_tokens)
        sync_file(tokens)
        sync_file(offsets)
    return n_tokens, n_documents
