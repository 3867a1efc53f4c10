"""Tokenised corpora on disk: built once, by all cores, then mapped into memory by everyone.

    <cache folder>/tokens/<key>/tokens.bin    the ids end to end, uint16 or uint32
                               /offsets.bin   int64: where each document begins, and the end
                               /mask.bin            of conversations: uint8, which tokens are learnt
                               /conversations.bin   and int64, where each was read and what of it is learnt
                               /weights.bin         where some are not 1: float32, weights of learnt tokens
                               /labels.bin          of texts with a class: int32, the class of each
                               /meta.json     counts, type, key, size of the vocabulary, hashes of blocks
    <cache folder>/tokens/<key>.building/     a build in progress, or what a killed one left
    <cache folder>/tokens/<key>.lock          held (flock) by the process that builds
    <cache folder>/hashes/                    content hashes, so that a second start reads no text
    <cache folder>/hub/                       what a dataset of the Hugging Face hub was when it was fetched

Of a cache folder that is a URL, all but tokens/<key>/ is on this machine (``local_cache``); see
:mod:`toolkit.data.remote_cache`.

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
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.local_paths import expand_user
from toolkit.data.build_cache import FORMAT, RowEncoder, build_cache, ids_dtype
from toolkit.data.cache_folder import local_cache
from toolkit.data.content_hash import content_hashes, say, stamps, too_large, unread
from toolkit.data.corpus import Corpus
from toolkit.data.file_kinds import kind
from toolkit.data.token_files import TokenCache, open_cache
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

if TYPE_CHECKING:
    from toolkit.data.chat.sft import ChatOptions


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
    root = local_cache(cache_folder)
    tokens = expand_user(cache_folder) if "://" in str(cache_folder) else root
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
        folder = tokens / "tokens" / key[:32]
        with _cache_errors(root):
            if (cache := _open_if_sound(folder, progress, verify=verify)) is not None:
                return cache
        if here:
            break
    _refuse_large(found, max_bytes)
    from toolkit.io.locks import waiting_lock

    with _cache_errors(root):
        lock = root / "tokens" / f"{folder.name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(lock, "tokenising this corpus", lambda text: say(progress, text)):
            if (cache := _open_if_sound(folder, False, verify=verify)) is not None:
                return cache

            def unchanged() -> bool:  # a file that is too young to be known by its stamp is read again
                return stamps(found) == before and _key(found, tokenizer, encoder, root, progress) == key

            build_cache(
                found, tokenizer, encoder, key, folder, unchanged, processes=processes, progress=progress
            )
    return open_cache(folder)


def _open_if_sound(folder: Path, progress: bool, *, verify: bool) -> TokenCache | None:
    try:
        return open_cache(folder, verify=verify)
    except FileNotFoundError:
        if folder.exists():
            say(progress, f"{folder} lacks a file; tokenising again")
    except DataError as error:
        if not isinstance(folder, Path):
            from toolkit.storage.remote_calls import StorageError

            if isinstance(error, StorageError):
                raise
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
        return LabelledTextEncoder(tokenizer, source.shape, ids_dtype(tokenizer))
    from toolkit.data.chat.sft import ConversationEncoder  # needs jinja
    from toolkit.data.chat.shapes import Shape

    assert chat is not None and isinstance(source.shape, Shape)
    return ConversationEncoder(tokenizer, source.shape, chat, ids_dtype(tokenizer))


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
