"""Build a token cache, which is invisible until it is committed.

Imported only for a corpus that has not been tokenized before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from toolkit.data import text_files
from toolkit.data.corpus import CLASSIFICATION, PREFERENCE, Corpus
from toolkit.data.token_files import LABELS, WEIGHTS
from toolkit.data.tokenize import Encoded, Encoder, TextEncoder, TokenizeBar
from toolkit.data.tokenize_helpers import encode_all
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.hardware import cores
from toolkit.io.atomic import sync_file, sync_folder
from toolkit.io.block_hashes import HashedFile

if TYPE_CHECKING:
    from toolkit.data.chat.sft import ConversationEncoder
    from toolkit.data.labeled_texts import LabeledTextEncoder

RowEncoder: TypeAlias = "ConversationEncoder | LabeledTextEncoder"

FORMAT = 1  # increment when files are split or documents framed differently
_MAX_REMARKS = 20
ALONE_BYTES = 16 << 20  # up to this much text, helper processes take longer to start than they save
ONES = 1 << 20  # weights written at a time


def ids_dtype(tokenizer: Tokenizer) -> str:
    """Return the smallest dtype that can store all ids."""
    return "uint16" if tokenizer.n_words <= 1 << 16 else "uint32"


def build_cache(
    source: Corpus,
    tokenizer: Tokenizer,
    encoder: RowEncoder | None,
    key: str,
    folder: Path,
    unchanged: Callable[[], bool],
    *,
    processes: int,
    progress: bool,
) -> None:
    """Write the cache of ``key`` and commit it as ``folder``, provided that the text is still ``unchanged``.

    The caller holds the lock. ``processes`` and ``progress`` are as in
    :func:`toolkit.data.token_cache.tokenize_corpus`.

    Raises:
        DataError: The corpus is unreadable or empty, or has changed.
    """
    processes = processes or _process_count(source)
    dtype = ids_dtype(tokenizer)
    encode: Encoder = TextEncoder(source.text_column, tokenizer, dtype)
    extra: Sequence[str] = ()
    if encoder:
        encode, extra = replace(encoder, files=source.files), encoder.EXTRA
    with _building(folder) as place:
        with TokenizeBar(source.name, source.n_bytes, processes, shown=progress) as bar:
            chunks = encode_all(source.chunks(), encode, processes=processes)
            with contextlib.closing(chunks):
                n_tokens, n_documents, blocks, remarks = _write(chunks, place, bar, extra)
        if n_documents == 0:
            files = "file" if len(source.files) == 1 else f"{len(source.files):,} files"
            raise DataError(
                f"the corpus {source.name} contains no text in its {files}\n"
                "  fix:  set training.dataset_path (validation.dataset_path) to files that contain text"
            )
        if not unchanged():
            raise DataError(f"the corpus {source.name} changed while it was tokenized\n  fix:  start again")
        meta = {
            "format": FORMAT,
            "fingerprint": key,
            "tokens": n_tokens,
            "documents": n_documents,
            "dtype": dtype,
            "n_words": tokenizer.n_words,
            "blocks": blocks,
            "remarks": dict(remarks.most_common(_MAX_REMARKS)),
        }
        place.commit(json.dumps(meta | _about(source, labeled=LABELS in blocks)).encode())


class Building(Protocol):
    """A cache being written, invisible until it is committed."""

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Create a file; closing it makes it complete on disk."""

    def commit(self, meta: bytes) -> None:
        """Make the cache visible, with ``meta`` as meta.json."""


@contextlib.contextmanager
def _building(folder: Path) -> Iterator[Building]:
    """Create the files for the cache of ``folder``; they are removed unless they are committed."""
    if not isinstance(folder, Path):
        from toolkit.data.remote_cache import RemoteBuilding

        with RemoteBuilding(folder) as remote:
            yield remote
        return
    local = _LocalBuilding(folder)
    try:
        yield local
    finally:
        shutil.rmtree(local.building, ignore_errors=True)


class _LocalBuilding:
    """Files under a temporary name; a rename commits them."""

    def __init__(self, folder: Path):
        _remove_leftovers(folder.parent)
        self.folder, self.building = folder, folder.with_suffix(".building")
        for leftover in (self.building, folder):  # a killed build; a damaged cache
            if leftover.exists():
                shutil.rmtree(leftover)
        self.building.mkdir()

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with open(self.building / name, "wb") as file:
            yield file
            sync_file(file)

    def commit(self, meta: bytes) -> None:
        with self.create("meta.json") as file:
            file.write(meta)
        sync_folder(self.building)
        os.rename(self.building, self.folder)
        sync_folder(self.folder.parent)


def _remove_leftovers(tokens: Path) -> None:
    """Remove the remains of killed builds of other corpora, whose locks are free."""
    for leftover in tokens.glob("*.building"):
        with open(leftover.with_suffix(".lock"), "a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover)


def _process_count(source: Corpus) -> int:
    n_bytes = source.n_text_bytes
    return 1 if n_bytes <= ALONE_BYTES else max(1, min(cores(), n_bytes // text_files.CHUNK_BYTES))


def _about(source: Corpus, *, labeled: bool) -> dict[str, Any]:
    """Return facts about the source for meta.json; they may differ between corpora of equal content."""
    about: dict[str, Any] = {"corpus": source.name}
    if source.shape is None or source.shape.format == CLASSIFICATION:
        return about
    files = [str(path) for path in source.files]
    return about | {"files": files, "paired": source.shape.format == PREFERENCE and not labeled}


def _write(
    chunks: Iterator[Encoded], place: Building, bar: TokenizeBar, extra: Sequence[str]
) -> tuple[int, int, dict[str, list[str]], Counter[str]]:
    """Write chunks as they arrive, with files for ``extra`` data and, if there are any, for weights.

    Returns the numbers of tokens and documents, the hashes of the files, and the remarks.
    """
    n_tokens = n_documents = 0
    remarks: Counter[str] = Counter()
    unfinished = 0  # tokens so far of a document that continues in the next chunk
    with contextlib.ExitStack() as opened:
        names = ("tokens.bin", "offsets.bin", *extra)
        files = {name: HashedFile(opened.enter_context(place.create(name))) for name in names}
        files["offsets.bin"].write(bytes(8))
        for chunk in chunks:
            extras = dict(chunk.extra or {})
            if (
                WEIGHTS in extras and WEIGHTS not in files
            ):  # the first weights: all previous tokens have weight 1
                files[WEIGHTS] = HashedFile(opened.enter_context(place.create(WEIGHTS)))
                for begin in range(0, n_tokens, ONES):
                    files[WEIGHTS].write(np.ones(min(ONES, n_tokens - begin), np.float32))
            elif WEIGHTS in files:
                extras.setdefault(WEIGHTS, np.ones(len(chunk.tokens), np.float32))
            files["tokens.bin"].write(chunk.tokens)
            remarks.update(chunk.remarks or {})
            for name, values in extras.items():
                files[name].write(values)
            lengths = chunk.lengths.copy()
            if not chunk.opens:
                lengths[0] += unfinished
            if not chunk.closes:
                unfinished, lengths = int(lengths[-1]), lengths[:-1]
            lengths = lengths[lengths > 0]  # without BOS and EOS a text may have no tokens
            ends = n_tokens + np.cumsum(lengths)
            files["offsets.bin"].write(ends)
            n_tokens, n_documents = (int(ends[-1]) if len(ends) else n_tokens, n_documents + len(ends))
            bar.advance(chunk.n_file_bytes, n_tokens)
    return n_tokens, n_documents, {name: file.hashes() for name, file in files.items()}, remarks
