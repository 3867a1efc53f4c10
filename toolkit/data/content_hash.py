"""Sizes and hashes of a corpus's files. Hashes are cached, so that files are not read twice.

    <cache folder>/hashes/    for each list of files, the hash of each file and its stamps at that time

A file is read again if its size, modification time or status change time differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from toolkit.compat import file_digest
from toolkit.config.local_paths import open_regular, read_bytes
from toolkit.data.corpus import Corpus
from toolkit.errors import DataError, Problem, printable
from toolkit.hardware import cores
from toolkit.io.json_fields import MAX_BYTES, parse_json

SETTLED_SECONDS = 2.0  # a newer file could change without a change of its time stamps
CORE_BYTES_PER_SECOND = 12e6  # benchmarks/results/tokenize_corpus.md, with tiktoken


def too_large(n_bytes: float, max_bytes: float, flags: str = "--job.config_file FILE …") -> Problem | None:
    """Return a problem if the text exceeds ``max_bytes``, the most that a run tokenizes itself, else None."""
    if n_bytes <= max_bytes:
        return None
    minutes = n_bytes / CORE_BYTES_PER_SECOND / cores() / 60
    about = f"{minutes / 60:,.1f} h" if minutes >= 100 else f"{math.ceil(minutes)} min"
    rule = (
        f"the corpus has about {n_bytes / 1e9:,.3g} GB of text that is not tokenized yet, and a run "
        f"tokenizes at most {max_bytes / 1e9:g} GB by itself"
    )
    fix = (
        f"run `llama-toolkit prepare-data {flags}` first, which takes about {about} on the {cores()} "
        f"cores of this machine; or raise data.max_inline_gb"
    )
    return Problem(rule, fix)


def stamps(source: Corpus) -> list[tuple[int, ...]]:
    """Return stamps that change when a file is written: size, modification time and status change time."""
    try:
        stats = [path.stat() for path in source.files]
    except OSError as error:
        raise DataError(f"the corpus cannot be read: {error}") from error
    return [(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]


def unread(source: Corpus, root: Path) -> list[Path]:
    """Return the files whose contents are unknown because their stamps have changed."""
    return _changed(source, _known(_record(source, root)), stamps(source))


def _changed(source: Corpus, known: Mapping[str, list], found: Iterable[tuple[int, ...]]) -> list[Path]:
    return [
        path
        for path, stamp in zip(source.files, found, strict=True)
        if known.get(str(path), [None])[0] != list(stamp)
    ]


def content_hashes(source: Corpus, root: Path, progress: bool) -> list[str]:
    """Return the SHA-256 of each file; hashes are cached per list of paths and valid while stamps are
    equal."""
    record, found = _record(source, root), stamps(source)
    known = _known(record)  # once: another rank may write it at any time
    if new := _changed(source, known, found):
        size = sum(path.stat().st_size for path in new)
        if size > 1 << 30:
            files = f"{len(new):,} files, {size / 1e9:.1f} GB"
            say(progress, f"hashing {files}, to find out whether they are already tokenized")
        settled = (time.time() - SETTLED_SECONDS) * 1e9
        with ThreadPoolExecutor(min(8, cores())) as threads:
            hashes = dict(zip(new, threads.map(_file_hash, new), strict=True))
        known = {
            str(path): [stamp, hashes.get(path) or known[str(path)][1]]
            for path, stamp in zip(source.files, found, strict=True)
        }
        # A read-only cache folder is not an error: it may already contain the tokens.
        with contextlib.suppress(OSError):
            remember(record, {path: entry for path, entry in known.items() if max(entry[0][1:]) < settled})
    return [known[str(path)][1] for path in source.files]


def remember(record: Path, entries: Mapping[str, Any]) -> None:
    """Write ``record`` as JSON atomically."""
    record.parent.mkdir(parents=True, exist_ok=True)
    temporary = record.with_name(f"{record.name}.{socket.gethostname()}.{os.getpid()}")
    temporary.write_text(json.dumps(entries))
    os.replace(temporary, record)


def _record(source: Corpus, root: Path) -> Path:
    paths = json.dumps([str(path) for path in source.files])
    return root / "hashes" / f"{hashlib.sha256(paths.encode()).hexdigest()[:32]}.json"


def _known(record: Path) -> dict[str, list]:
    """Return the cached stamps and hash of each file, ignoring invalid entries."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        found = parse_json(read_bytes(record, at_most=MAX_BYTES))
    entries = found.items() if isinstance(found, dict) else ()
    return {
        path: entry
        for path, entry in entries
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)
    }


def _file_hash(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def say(progress: bool, message: str) -> None:
    """Print a message to stderr if ``progress``."""
    if progress:
        print(printable(message), file=sys.stderr, flush=True)
