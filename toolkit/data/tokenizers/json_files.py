"""Properties of a tokenizer.json. The tokenizers library is imported only when needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.config.types import MAX_SIZE
from toolkit.errors import DataError
from toolkit.io.json_fields import parse_object


def json_vocabulary_size(data: bytes, path: Path) -> int:
    """Return the largest id + 1 among the vocabulary and the added tokens of a ``tokenizer.json``."""
    content = parse_object(data, path)
    model, added = content.get("model"), content.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise DataError(f"{path} is not a tokenizer.json of Hugging Face tokenizers: it has no model.vocab")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise DataError(f"{path}: added_tokens must be a list of objects")
    ids = [*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary)))]
    ids += [token.get("id") for token in added]
    if not {*map(type, ids)} <= {int} or not 0 <= min(ids, default=0) <= max(ids, default=0) <= MAX_SIZE:
        raise DataError(f"{path}: token ids must be integers from 0 to {MAX_SIZE}")
    return max(ids, default=-1) + 1


def first_added(post_processor: Any, folder: Path) -> int | None:
    """Return the token that a tokenizer.json's ``post_processor`` puts before a text, found by applying it to
    a text of one token."""
    import tokenizers

    unknown = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    described = json.dumps({"model": unknown, "post_processor": post_processor})
    with tokenizers_errors(folder / "tokenizer.json"):
        encoding = tokenizers.Tokenizer.from_str(described).encode("a")
    return encoding.ids[0] if encoding.ids and encoding.special_tokens_mask[0] else None


@contextmanager
def tokenizers_errors(path: Path) -> Iterator[None]:
    """Add the file name to exceptions and panics of the tokenizers library.

    Raises:
        DataError: The library raised one of them.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise DataError(f"{path} cannot be read by tokenizers: {error}") from error
