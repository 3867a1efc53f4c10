"""A tokenised corpus, mapped into memory; :mod:`toolkit.data.token_cache` tells how it lies on disk."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from toolkit.config.local_paths import read_bytes
from toolkit.config.types import MAX_SIZE
from toolkit.errors import DataError
from toolkit.io.block_hashes import BLOCK_BYTES, first_damaged
from toolkit.io.json_fields import MAX_BYTES, Fields, parse_object

LABELS = "labels.bin"


@dataclass(frozen=True, eq=False)
class TokenCache:
    """A tokenised corpus, mapped into memory.

    ``tokens`` (n_tokens,) uint16 or uint32, the documents end to end; ``offsets`` (n_documents + 1,) int64.
    Every id is below ``n_words``. ``fingerprint`` names the content, whatever the place. Of conversations
    there are also ``mask`` (n_tokens,) uint8, 1 where a token is learnt, ``conversations`` (n_documents, 4)
    int64 as :mod:`toolkit.data.chat.empty_masks` has it, and ``files``, the names that they had when they
    were tokenised; where they are ``paired``, each with an even number is chosen over the one behind it. Of
    texts with a class there are ``labels`` (n_documents,) int32. Pickles as its folder's name.
    """

    folder: Path
    fingerprint: str
    n_documents: int
    n_tokens: int
    n_words: int
    tokens: np.ndarray = field(repr=False)
    offsets: np.ndarray = field(repr=False)
    mask: np.ndarray | None = field(default=None, repr=False)
    conversations: np.ndarray | None = field(default=None, repr=False)
    files: tuple[str, ...] = ()
    labels: np.ndarray | None = field(default=None, repr=False)
    paired: bool = False

    def __reduce__(self) -> tuple:
        return open_cache, (self.folder,)


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a mixture, under the name that its order is keyed by."""

    name: str
    weight: float
    corpus: TokenCache


def open_cache(folder: Path, *, verify: bool = False) -> TokenCache:
    """Map a built cache, of which ``verify`` reads every block, and otherwise some are.

    Raises FileNotFoundError, or DataError where a file is not as meta.json says.
    """
    content = read_bytes(folder / "meta.json", at_most=MAX_BYTES)
    meta = Fields(parse_object(content, folder / "meta.json"))
    if "blocks" not in meta.values:
        raise DataError(f"{folder} was built before caches had hashes that tell whether it is sound")
    dtype = np.dtype({"uint16": "uint16"}.get(str(meta.values.get("dtype")), "uint32"))
    n_tokens, n_documents, n_words = (
        meta.count(key, at_most=2**62 if key != "n_words" else MAX_SIZE)
        for key in ("tokens", "documents", "n_words")
    )
    fingerprint, blocks = meta.values.get("fingerprint"), meta.inner("blocks") or Fields({})
    if not isinstance(fingerprint, str):
        meta.refuse("fingerprint", "must be a hash")
    files = meta.values.get("files")
    if not (files is None or (isinstance(files, list) and all(isinstance(name, str) for name in files))):
        meta.refuse("files", "must be the names of files")
    meta.finish(f"{folder / 'meta.json'} is damaged")
    expected = {"tokens.bin": n_tokens * dtype.itemsize, "offsets.bin": (n_documents + 1) * 8}
    if files is not None:
        expected |= {"mask.bin": n_tokens, "conversations.bin": n_documents * 32}
    if LABELS in blocks.values:
        expected[LABELS] = n_documents * 4
    for name, size in expected.items():
        actual = (folder / name).stat().st_size
        if actual != size:
            raise DataError(f"{folder / name} is damaged: it has {actual:,} bytes and should have {size:,}")
        hashes = blocks.values.get(name)
        if not isinstance(hashes, list) or len(hashes) != max(1, -(-size // BLOCK_BYTES)):
            raise DataError(f"{folder / 'meta.json'} is damaged: it has no hash for each block of {name}")
        if (begin := first_damaged(folder / name, hashes, every=verify)) is not None:
            raise DataError(f"{folder / name} is damaged: its block at byte {begin:,} was altered")
    tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype, "r"))  # plain views: slices cost less
    offsets = np.asarray(np.memmap(folder / "offsets.bin", np.int64, "r"))
    if offsets[0] != 0 or offsets[-1] != n_tokens:
        raise DataError(f"{folder / 'offsets.bin'} is damaged: it does not span the {n_tokens:,} tokens")
    assert isinstance(fingerprint, str)
    cache = TokenCache(folder, fingerprint, n_documents, n_tokens, n_words, tokens, offsets)
    if LABELS in expected:
        return replace(cache, labels=np.asarray(np.memmap(folder / LABELS, np.int32, "r")))
    if files is None:
        return cache
    return replace(
        cache,
        mask=np.asarray(np.memmap(folder / "mask.bin", np.uint8, "r")),
        conversations=np.asarray(np.memmap(folder / "conversations.bin", np.int64, "r")).reshape(-1, 4),
        files=tuple(files),
        paired=bool(meta.values.get("paired")),
    )
