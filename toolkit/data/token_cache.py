"""Tokenized corpora on disk: built once, on all cores, then memory-mapped by every process.

    <cache folder>/tokens/<key>/tokens.bin    concatenated ids, uint16 or uint32
                               /offsets.bin   int64: start of each document, and the end
                               /mask.bin            conversations: uint8, which tokens are in the loss
                               /conversations.bin   int64: source and loss tokens of each conversation
                               /weights.bin         float32: token weights, if some are not 1
                               /labels.bin          int32: classes of texts; 1 for desirable answers
                               /margins.bin         pairs for reward models: float32
                               /meta.json     counts, dtype, key, vocabulary size, hashes of blocks
    <cache folder>/tokens/<key>.building/     a build in progress, or the remains of a killed one
    <cache folder>/tokens/<key>.lock          locked (flock) by the process that builds
    <cache folder>/hashes/                    content hashes, so that a second start reads no text
    <cache folder>/hub/                       records of downloaded datasets of the Hugging Face Hub

If the cache folder is a URL, everything except tokens/<key>/ is local (``local_cache``); see
:mod:`toolkit.data.remote_cache`.

The key is the SHA-256 of the files' contents in order (for a dataset of the Hub, of its revision), the
tokenizer's fingerprint, the text column (for conversations, their shape, chat format and the choice of tokens
in the loss) and ``FORMAT``. A folder with its final name is complete, because it gets that name by one atomic
rename after fsync. The kernel releases the lock of a process that dies; the next process that takes the lock
owns the ``.building`` folder and removes it. A build also removes the folders of other corpora that no
process is building.

Opening a cache compares some blocks of its files with their hashes (all blocks of a small cache); a damaged
cache is rebuilt. The loader rejects ids outside the tokenizer's vocabulary.
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


def tokenize_corpus(
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
    """Open the token cache of ``source``, building it if it is missing or damaged.

    Any number of processes may call this concurrently: one builds, the others wait.

    Args:
        progress: Report progress on stderr.
        processes: Number of tokenizing processes; 0 means one per core, or only this one for a small corpus.
        verify: Read all of an existing cache, instead of some blocks.
        chat: How conversations become tokens; required for a source of conversations.

    Raises:
        DataError: The corpus is unreadable, undecodable or empty, or changes during the build; it is not
            built yet and has more than ``max_inline_gb`` gigabytes of text; or the cache folder is not
            writable.
    """
    root = local_cache(cache_folder)
    tokens = expand_user(cache_folder) if "://" in str(cache_folder) else root
    encoder = _encoder(source, tokenizer, chat)
    max_bytes = max_inline_gb * 1e9
    for again in (False, True):
        with _cache_errors(root):
            found = source.fetch(root, progress=progress, max_bytes=max_bytes, again=again)
        if not found.identity and unread(found, root):
            _check_size(found, max_bytes)  # before all of it is read for hashing
        here = all(
            path.exists() for path in found.files
        )  # files of the Hub may be gone while their tokens exist
        before = stamps(found) if here else None  # taken before the contents are hashed for the key
        key = _key(found, tokenizer, encoder, root, progress)
        folder = tokens / "tokens" / key[:32]
        with _cache_errors(root):
            if (cache := _open_if_sound(folder, progress, verify=verify)) is not None:
                return cache
        if here:
            break
    _check_size(found, max_bytes)
    from toolkit.io.locks import waiting_lock

    with _cache_errors(root):
        lock = root / "tokens" / f"{folder.name}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with waiting_lock(lock, "tokenizing this corpus", lambda text: say(progress, text)):
            if (cache := _open_if_sound(folder, False, verify=verify)) is not None:
                return cache

            def unchanged() -> bool:  # files too new for their stamps to be reliable are read again
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
            say(progress, f"{folder} lacks a file; tokenizing again")
    except DataError as error:
        if not isinstance(folder, Path):
            from toolkit.storage.remote_calls import StorageError

            if isinstance(error, StorageError):
                raise
        say(progress, f"{error}; tokenizing again")
    return None


@contextlib.contextmanager
def _cache_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"the token cache {root} cannot be used: {error}\n  fix:  set data.cache_folder to a folder on a "
            f"local file system that is writable and has room (about 0.6 bytes per byte of text)"
        ) from error


def _check_size(source: Corpus, max_bytes: float) -> None:
    if max_bytes == math.inf:
        return
    if problem := too_large(source.n_text_bytes, max_bytes):
        raise DataError(f"{source.name}: {problem}")


def _encoder(source: Corpus, tokenizer: Tokenizer, chat: ChatOptions | None) -> RowEncoder | None:
    """Return the encoder of conversations or labeled texts; None for plain text."""
    if source.shape is None:
        return None
    from toolkit.data.labeled_texts import LabeledTextEncoder, LabeledTexts

    if isinstance(source.shape, LabeledTexts):
        return LabeledTextEncoder(tokenizer, source.shape, ids_dtype(tokenizer))
    from toolkit.data.chat.sft import ConversationEncoder  # needs jinja
    from toolkit.data.chat.shapes import Shape

    assert chat is not None and isinstance(source.shape, Shape)
    return ConversationEncoder(tokenizer, source.shape, chat, ids_dtype(tokenizer))


def _key(source: Corpus, tokenizer: Tokenizer, encoder: RowEncoder | None, root: Path, progress: bool) -> str:
    column: Any = source.text_column if any(kind(path) != "text" for path in source.files) else None
    if encoder:
        column = encoder.fingerprint
    contents: list | str = source.identity
    if not contents:
        kinds = map(kind, source.files)
        contents = list(zip(kinds, content_hashes(source, root, progress), strict=True))
    parts = [FORMAT, contents, column, tokenizer.fingerprint]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
