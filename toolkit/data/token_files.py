"""A memory-mapped tokenized corpus; :mod:`toolkit.data.token_cache` describes the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from toolkit.config.local_paths import read_bytes
from toolkit.config.types import MAX_SIZE
from toolkit.errors import DataError
from toolkit.io.block_hashes import BLOCK_BYTES, first_damaged
from toolkit.io.json_fields import MAX_BYTES, Fields, parse_object

LABELS, MARGINS, WEIGHTS = "labels.bin", "margins.bin", "weights.bin"


@dataclass(frozen=True, eq=False)
class TokenCache:
    """A memory-mapped tokenized corpus.

    ``tokens`` (n_tokens,) uint16 or uint32, the concatenated documents; ``offsets`` (n_documents + 1,) int64.
    Every id is below ``n_words``. ``fingerprint`` identifies the content.

    Conversations also have ``mask`` (n_tokens,) uint8, 1 for tokens in the loss; ``weights`` (n_tokens,)
    float32 of these tokens, if any is not 1; ``conversations`` (n_documents, 4) int64, see
    :mod:`toolkit.data.chat.empty_masks`; and ``files``, the paths at the time of tokenization. If ``paired``,
    each even-numbered conversation is chosen over the next one. Labeled texts, and unpaired preferences, have
    ``labels`` (n_documents,) int32; 1 means a desirable answer. Pairs for a reward model have ``margins``
    (n_documents,) float32. ``remarks`` maps notes for the user to numbers of documents. A cache is pickled as
    the path of its folder."""

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
    margins: np.ndarray | None = field(default=None, repr=False)
    paired: bool = False
    weights: np.ndarray | None = field(default=None, repr=False)
    remarks: Mapping[str, int] = field(default_factory=dict)

    def __reduce__(self) -> tuple:
        return open_cache, (self.folder,)


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a mixture; its name keys its sample order."""

    name: str
    weight: float
    corpus: TokenCache


def open_cache(folder: Path, *, verify: bool = False) -> TokenCache:
    """Memory-map an existing cache. ``verify`` reads every block; otherwise only some are read.

    Raises:
        FileNotFoundError: The cache or one of its files is missing.
        DataError: A file does not match meta.json.
    """
    content = read_bytes(folder / "meta.json", at_most=MAX_BYTES)
    meta = Fields(parse_object(content, folder / "meta.json"))
    if "blocks" not in meta.values:
        raise DataError(f"{folder} was built by an older version, without hashes")
    dtype = np.dtype({"uint16": "uint16"}.get(str(meta.values.get("dtype")), "uint32"))
    n_tokens, n_documents, n_words = (
        meta.count(key, at_most=2**62 if key != "n_words" else MAX_SIZE)
        for key in ("tokens", "documents", "n_words")
    )
    fingerprint, blocks = meta.values.get("fingerprint"), meta.inner("blocks") or Fields({})
    if not isinstance(fingerprint, str):
        meta.reject("fingerprint", "must be a hash")
    files = meta.values.get("files")
    if not (files is None or (isinstance(files, list) and all(isinstance(name, str) for name in files))):
        meta.reject("files", "must be the names of files")
    counts = meta.inner("remarks") or Fields({})
    remarks = {remark: counts.count(remark) for remark in counts.values}
    meta.finish(f"{folder / 'meta.json'} is damaged")
    expected = {"tokens.bin": (dtype.name, n_tokens), "offsets.bin": ("int64", n_documents + 1)}
    if files is not None:
        expected |= {"mask.bin": ("uint8", n_tokens), "conversations.bin": ("int64", n_documents * 4)}
    if LABELS in blocks.values:
        expected[LABELS] = ("int32", n_documents)
    if MARGINS in blocks.values:
        expected[MARGINS] = ("float32", n_documents)
    if WEIGHTS in blocks.values:
        expected[WEIGHTS] = ("float32", n_tokens)
    arrays = {}
    for name, (kind, length) in expected.items():
        path, size = folder / name, length * np.dtype(kind).itemsize
        actual = path.stat().st_size
        if actual != size:
            raise DataError(f"{path} is damaged: it has {actual:,} bytes instead of {size:,}")
        hashes = blocks.values.get(name)
        if not isinstance(hashes, list) or len(hashes) != max(1, -(-size // BLOCK_BYTES)):
            raise DataError(f"{folder / 'meta.json'} is damaged: it lacks hashes of blocks of {name}")
        if (begin := first_damaged(path, hashes, every=verify)) is not None:
            raise DataError(f"{path} is damaged: its block at byte {begin:,} was altered")
        if isinstance(path, Path):
            arrays[name] = np.asarray(np.memmap(path, kind, "r"))  # slices of a plain view are faster
        else:
            from toolkit.data.remote_cache import remote_array

            arrays[name] = remote_array(path, kind, length, hashes)
    tokens, offsets = arrays["tokens.bin"], arrays["offsets.bin"]
    if offsets[0] != 0 or offsets[-1] != n_tokens:
        raise DataError(f"{folder / 'offsets.bin'} is damaged: it does not span the {n_tokens:,} tokens")
    assert isinstance(fingerprint, str)
    return TokenCache(
        folder, fingerprint, n_documents, n_tokens, n_words, tokens, offsets,
        mask=arrays.get("mask.bin"),
        conversations=None if files is None else arrays["conversations.bin"].reshape(-1, 4),
        files=tuple(files or ()),
        labels=arrays.get(LABELS),
        margins=arrays.get(MARGINS),
        paired=bool(meta.values.get("paired")),
        weights=arrays.get(WEIGHTS),
        remarks=remarks,
    )  # fmt: skip
