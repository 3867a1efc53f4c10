"""Tokenised corpora on disk: built once, by all cores, then mapped into memory by everyone.

    <cache folder>/tokens/<key>/tokens.bin    the ids end to end, uint16 or uint32
                               /offsets.bin   int64: where each document begins, and the end
                               /mask.bin            of conversations: uint8, which tokens are learnt
                               /conversations.bin   and int64, where each was read and what of it is learnt
                               /labels.bin          of texts with a class: int32, the class of each
                               /meta.json     counts, type, key, size of the vocabulary, hashes of blocks
    <cache folder>/tokens/<key>.building/     a build in progress, or what a killed one left
    <cache folder>/tokens/<key>.lock          held (flock) by the process that builds
    <cache folder>/hashes/                    content hashes, so that a second start reads no text
    <cache folder>/hub/                       what a dataset of the Hugging Face hub was when it was fetched

The key is the SHA-256 of the files' contents in order (for a dataset of the hub, of what names its
revision), the tokenizer's fingerprint, the text column (of conversations, their shape, chat format and what
of them is learnt) and ``FORMAT``. A folder under its final name is complete: it gets there by one atomic
rename after fsync. The kernel releases the lock of a process that dies, however it dies; whoever takes the
lock next owns the ``.building`` folder and removes it; a build also removes those of other corpora that
nobody builds.

Opening a cache compares some blocks of its files with their hashes, of a small one all, and what is damaged
is built again. The loader refuses ids that the tokenizer does not have.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from toolkit.data.content_hash import content_hashes, locked, say, stamps, too_large, unread
from toolkit.data.corpus import CLASSIFICATION, PREFERENCE, Corpus, kind
from toolkit.data.token_files import TokenCache, open_cache
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.hardware import cores
from toolkit.io.atomic import sync_file, sync_folder
from toolkit.io.block_hashes import HashedFile

if TYPE_CHECKING:
    from toolkit.data.chat.sft import ChatOptions, ConversationEncoder
    from toolkit.data.labelled_texts import LabelledTextEncoder
    from toolkit.data.tokenize import Encoded, Encoder, TokenizeBar

RowEncoder: TypeAlias = "ConversationEncoder | LabelledTextEncoder"

FORMAT = 1  # raise it when pieces are cut, or documents are framed, in another way
ALONE_BYTES = 16 << 20  # of text: up to here helpers would hardly be under way before one process is done


def tokenized(
    source: Corpus,
    tokenizer: Tokenizer,
    *,
    cache_folder: str | Path,
    progress: bool = True,
    processes: int = 0,
    max_inline_gb: float = math.inf,
    verify: bool = False,
    chat: ChatOptions | None = None,
) -> TokenCache:
    """The tokenised ``source``: opened where it has been built before and is sound, else built now.

    A source of conversations needs ``chat``, which says how they become tokens.

    Any number of processes may call this at once: one builds, the others wait. ``progress`` shows on
    stderr what is going on. ``processes`` 0 is one a core, or none but this one for a small corpus.
    ``verify`` reads all of a cache that is there, where opening it reads some.

    Raises:
        DataError: unreadable, undecodable or empty corpus; one that changes meanwhile; one of more than
            ``max_inline_gb`` gigabytes of text that is not built yet; a cache folder that cannot be written.
    """
    root = Path(cache_folder).expanduser().absolute()
    encoder = _encoder(source, tokenizer, chat)
    max_bytes = max_inline_gb * 1e9
    for again in (False, True):
        with _cache_errors(root):
            found = source.fetched(root, progress=progress, max_bytes=max_bytes, again=again)
        if not found.identity and unread(found, root):
            _refuse_large(found, max_bytes)  # before all of it is read for its hash
        here = all(path.exists() for path in found.files)  # of the hub the tokens may be all that is left
        before = stamps(found) if here else None  # the key is of what the files hold from here on
        key = _key(found, tokenizer, encoder, root, progress)
        folder = root / "tokens" / key[:32]
        with _cache_errors(root):
            if (cache := _open_if_sound(folder, progress, verify=verify)) is not None:
                return cache
        if here:
            break
    _refuse_large(found, max_bytes)
    with _cache_errors(root):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_suffix(".lock"), progress, "tokenising this corpus"):
            if (cache := _open_if_sound(folder, False, verify=verify)) is not None:
                return cache
            _remove_leftovers(folder.parent)

            def unchanged() -> bool:  # a file that is too young to be known by its stamp is read again
                return stamps(found) == before and _key(found, tokenizer, encoder, root, progress) == key

            _build(
                found,
                tokenizer,
                encoder,
                key,
                folder,
                progress,
                processes or _process_count(found),
                unchanged,
            )
    return open_cache(folder)


def _open_if_sound(folder: Path, progress: bool, *, verify: bool) -> TokenCache | None:
    try:
        return open_cache(folder, verify=verify)
    except FileNotFoundError:
        if folder.exists():
            say(progress, f"{folder} lacks a file; tokenising again")
    except DataError as error:
        say(progress, f"{error}; tokenising again")
    return None


@contextlib.contextmanager
def _cache_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the token cache {root} cannot be used: {error}\n  fix:  set data.cache_folder to a folder on "
            f"a local file system that this user can write and that has room (about 0.6 bytes a byte of text)"
        ) from error


def _remove_leftovers(tokens: Path) -> None:
    """Remove what killed builds of other corpora left: theirs is a lock that nobody holds."""
    for leftover in tokens.glob("*.building"):
        with open(leftover.with_suffix(".lock"), "a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover)


def _refuse_large(source: Corpus, max_bytes: float) -> None:
    if max_bytes == math.inf:
        return
    if problem := too_large(source.n_text_bytes, max_bytes):
        raise DataError(f"{source.name}: {problem}")


def _encoder(source: Corpus, tokenizer: Tokenizer, chat: ChatOptions | None) -> RowEncoder | None:
    """Return the encoder of rows that are more than a text; None for text."""
    if source.shape is None:
        return None
    from toolkit.data.labelled_texts import LabelledTextEncoder, LabelledTexts

    if isinstance(source.shape, LabelledTexts):
        return LabelledTextEncoder(tokenizer, source.shape, _dtype(tokenizer))
    from toolkit.data.chat.sft import ConversationEncoder  # needs jinja
    from toolkit.data.chat.shapes import Shape

    assert chat is not None and isinstance(source.shape, Shape)
    return ConversationEncoder(tokenizer, source.shape, chat, _dtype(tokenizer))


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.n_words <= 1 << 16 else "uint32"


def _key(
    source: Corpus,
    tokenizer: Tokenizer,
    encoder: RowEncoder | None,
    root: Path,
    progress: bool,
) -> str:
    column: Any = source.text_column if any(kind(path) != "text" for path in source.files) else None
    if encoder:
        column = encoder.fingerprint
    contents: list | str = source.identity
    if not contents:
        kinds = map(kind, source.files)
        contents = list(zip(kinds, content_hashes(source, root, progress), strict=True))
    parts = [FORMAT, contents, column, tokenizer.fingerprint]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _process_count(source: Corpus) -> int:
    from toolkit.data.text_files import PIECE_BYTES

    n_bytes = source.n_text_bytes
    return 1 if n_bytes <= ALONE_BYTES else max(1, min(cores(), n_bytes // PIECE_BYTES))


def _build(
    source: Corpus,
    tokenizer: Tokenizer,
    encoder: RowEncoder | None,
    key: str,
    folder: Path,
    progress: bool,
    processes: int,
    unchanged: Callable[[], bool],
) -> None:
    """Write the cache under a temporary name and commit it, if the text is ``unchanged`` since its key was
    made. The caller holds the lock."""
    from toolkit.data.tokenize import TextEncoder, TokenizeBar, encode_all  # only where something is built

    building = folder.with_suffix(".building")
    for leftover in (building, folder):  # of a killed build; a damaged cache
        if leftover.exists():
            shutil.rmtree(leftover)
    building.mkdir()
    dtype = _dtype(tokenizer)
    encode: Encoder = TextEncoder(source.text_column, tokenizer, dtype)
    extra: Sequence[str] = ()
    if encoder:
        encode, extra = replace(encoder, files=source.files), encoder.EXTRA
    try:
        with TokenizeBar(source.name, source.n_bytes, processes, shown=progress) as bar:
            pieces = encode_all(source.pieces(), encode, processes=processes)
            with contextlib.closing(pieces):
                n_tokens, n_documents, blocks = _write(pieces, building, bar, extra)
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
        }
        with open(building / "meta.json", "wb") as file:
            file.write(json.dumps(meta | _about(source)).encode())
            sync_file(file)
        sync_folder(building)
        os.rename(building, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _about(source: Corpus) -> dict[str, Any]:
    """Facts of the source for meta.json, which others of the same content may not share."""
    about: dict[str, Any] = {"corpus": source.name}
    if source.shape is None or source.shape.format == CLASSIFICATION:
        return about
    files = [str(path) for path in source.files]
    return about | {"files": files, "paired": source.shape.format == PREFERENCE}


def _write(
    pieces: Iterator[Encoded], building: Path, bar: TokenizeBar, extra: Sequence[str]
) -> tuple[int, int, dict[str, list[str]]]:
    """Stream pieces to disk, with files for what is ``extra``; returns the number of tokens and of
    documents, and the hashes of the files."""
    n_tokens = n_documents = 0
    unfinished = 0  # tokens so far of a document that the next piece goes on with
    with contextlib.ExitStack() as opened:
        names = ("tokens.bin", "offsets.bin", *extra)
        raw = {name: opened.enter_context(open(building / name, "wb")) for name in names}
        files = {name: HashedFile(file) for name, file in raw.items()}
        files["offsets.bin"].write(bytes(8))
        for piece in pieces:
            files["tokens.bin"].write(piece.tokens)
            for name, values in (piece.extra or {}).items():
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
        for file in raw.values():
            sync_file(file)
    return n_tokens, n_documents, {name: file.hashes() for name, file in files.items()}
