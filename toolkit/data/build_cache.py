"""Builds a token cache: the pieces of a corpus as tokens, which nobody finds before they are committed.

Loaded where a corpus has not been tokenised before.
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
from toolkit.data.token_files import WEIGHTS
from toolkit.data.tokenize import Encoded, Encoder, TextEncoder, TokenizeBar
from toolkit.data.tokenize_helpers import encode_all
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.hardware import cores
from toolkit.io.atomic import sync_file, sync_folder
from toolkit.io.block_hashes import HashedFile

if TYPE_CHECKING:
    from toolkit.data.chat.sft import ConversationEncoder
    from toolkit.data.labelled_texts import LabelledTextEncoder

RowEncoder: TypeAlias = "ConversationEncoder | LabelledTextEncoder"

FORMAT = 1  # raise it when pieces are cut, or documents are framed, in another way
_MAX_REMARKS = 20
ALONE_BYTES = 16 << 20  # of text: up to here helpers would hardly be under way before one process is done
ONES = 1 << 20  # weights that are written at once


def ids_dtype(tokenizer: Tokenizer) -> str:
    """The type that holds every id."""
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
    """Write the cache of ``key`` and commit it as ``folder``, if the text is ``unchanged`` since the key was
    made. The caller holds the lock. ``processes`` and ``progress`` are those of
    :func:`toolkit.data.token_cache.tokenized`.

    Raises:
        DataError: the corpus is unreadable or empty, or has changed.
    """
    processes = processes or _process_count(source)
    dtype = ids_dtype(tokenizer)
    encode: Encoder = TextEncoder(source.text_column, tokenizer, dtype)
    extra: Sequence[str] = ()
    if encoder:
        encode, extra = replace(encoder, files=source.files), encoder.EXTRA
    with _building(folder) as place:
        with TokenizeBar(source.name, source.n_bytes, processes, shown=progress) as bar:
            pieces = encode_all(source.pieces(), encode, processes=processes)
            with contextlib.closing(pieces):
                n_tokens, n_documents, blocks, remarks = _write(pieces, place, bar, extra)
        if n_documents == 0:
            files = "file" if len(source.files) == 1 else f"{len(source.files):,} files"
            raise DataError(
                f"the corpus {source.name} holds no text in its {files}\n"
                "  fix:  name files that have some in training.dataset_path (validation.dataset_path)"
            )
        if not unchanged():
            raise DataError(f"the corpus {source.name} changed while it was tokenised\n  fix:  start again")
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
        place.commit(json.dumps(meta | _about(source)).encode())


class Building(Protocol):
    """A cache that is being written, and that nobody finds before it is committed."""

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A new file, which is complete on disk once it is closed."""

    def commit(self, meta: bytes) -> None:
        """Have the cache be there, with meta.json."""


@contextlib.contextmanager
def _building(folder: Path) -> Iterator[Building]:
    """The cache of ``folder`` while it is built; what is not committed is removed."""
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
    """Files under a temporary name, until a rename commits them."""

    def __init__(self, folder: Path):
        _remove_leftovers(folder.parent)
        self.folder, self.building = folder, folder.with_suffix(".building")
        for leftover in (self.building, folder):  # of a killed build; a damaged cache
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
    """Remove what killed builds of other corpora left: theirs is a lock that nobody holds."""
    for leftover in tokens.glob("*.building"):
        with open(leftover.with_suffix(".lock"), "a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover)


def _process_count(source: Corpus) -> int:
    n_bytes = source.n_text_bytes
    return 1 if n_bytes <= ALONE_BYTES else max(1, min(cores(), n_bytes // text_files.PIECE_BYTES))


def _about(source: Corpus) -> dict[str, Any]:
    """Facts of the source for meta.json, which others of the same content may not share."""
    about: dict[str, Any] = {"corpus": source.name}
    if source.shape is None or source.shape.format == CLASSIFICATION:
        return about
    files = [str(path) for path in source.files]
    return about | {"files": files, "paired": source.shape.format == PREFERENCE}


def _write(
    pieces: Iterator[Encoded], place: Building, bar: TokenizeBar, extra: Sequence[str]
) -> tuple[int, int, dict[str, list[str]], Counter[str]]:
    """Write pieces as they come, with files for what is ``extra``, and for weights where there are some;
    returns the number of tokens and of documents, the hashes of the files, and the remarks."""
    n_tokens = n_documents = 0
    remarks: Counter[str] = Counter()
    unfinished = 0  # tokens so far of a document that the next piece goes on with
    with contextlib.ExitStack() as opened:
        names = ("tokens.bin", "offsets.bin", *extra)
        files = {name: HashedFile(opened.enter_context(place.create(name))) for name in names}
        files["offsets.bin"].write(bytes(8))
        for piece in pieces:
            extras = dict(piece.extra or {})
            if WEIGHTS in extras and WEIGHTS not in files:  # the first: those of all tokens before are 1
                files[WEIGHTS] = HashedFile(opened.enter_context(place.create(WEIGHTS)))
                for begin in range(0, n_tokens, ONES):
                    files[WEIGHTS].write(np.ones(min(ONES, n_tokens - begin), np.float32))
            elif WEIGHTS in files:
                extras.setdefault(WEIGHTS, np.ones(len(piece.tokens), np.float32))
            files["tokens.bin"].write(piece.tokens)
            remarks.update(piece.remarks or {})
            for name, values in extras.items():
                files[name].write(values)
            lengths = piece.lengths.copy()
            if not piece.opens:
                lengths[0] += unfinished
            if not piece.closes:
                unfinished, lengths = int(lengths[-1]), lengths[:-1]
            lengths = lengths[lengths > 0]  # a tokenizer without BOS and EOS may have nothing for a text
            ends = n_tokens + np.cumsum(lengths)
            files["offsets.bin"].write(ends)
            n_tokens, n_documents = (int(ends[-1]) if len(ends) else n_tokens, n_documents + len(ends))
            bar.advance(piece.n_file_bytes, n_tokens)
    return n_tokens, n_documents, {name: file.hashes() for name, file in files.items()}, remarks
