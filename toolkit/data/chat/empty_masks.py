"""Reject or drop conversations without tokens in the loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from toolkit.data.text_files import unit_of
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError

NO_LOSS = -1
FILE, ROW, FIRST, IN_LOSS = range(4)
"""Columns stored per conversation: index of its file, line or row in the file, first token in the loss (or
NO_LOSS), and number of tokens in the loss."""
NAMED = 5  # maximum number of conversations listed in a message


def without_loss(corpus: TokenCache, seq_len: int) -> np.ndarray:
    """Return, per conversation, whether none of its tokens within a row of ``seq_len`` is in the loss."""
    assert corpus.conversations is not None
    first = corpus.conversations[:, FIRST]
    return (first < 0) | (first > places(corpus, seq_len))


def places(corpus: TokenCache, seq_len: int, *, predicted: int = 1) -> np.ndarray:
    """Return the number of positions of each conversation in a row of ``seq_len``.

    The number is one less than that of tokens, because the last token is only ``predicted``, and at most the
    row length. The two conversations of a pair share a row: the longer one is truncated, or both to half a
    row.
    """
    whole = np.diff(corpus.offsets) - predicted
    if not corpus.paired:
        return np.minimum(whole, seq_len)
    other = whole.reshape(-1, 2)[:, ::-1].ravel()
    return np.minimum(whole, np.maximum(seq_len // 2, seq_len - other))


def together(corpus: TokenCache) -> int:
    """Return the number of consecutive conversations that are kept or dropped together."""
    return 2 if corpus.paired else 1


def check_conversations(corpus: TokenCache, seq_len: int, empty_mask: str, table: str) -> None:
    """Check that every conversation has a token in the loss, unless those without one are to be dropped.

    Raises:
        DataError: Some conversations have none, before or after truncation, and ``empty_mask`` is "error"; or
            no conversation has one.
    """
    assert corpus.conversations is not None
    empty = without_loss(corpus, seq_len)
    dropped = empty.reshape(-1, together(corpus)).any(axis=1)
    if not empty.any() or (empty_mask == "drop" and not dropped.all()):
        return
    about = corpus.conversations[empty]
    never = int((about[:, FIRST] < 0).sum())
    reasons = [f"{never:,} have no assistant message in the loss"] if never else []
    if never < len(about):
        shared = " shared by a pair" if corpus.paired else ""
        reasons += [f"{len(about) - never:,} are truncated to {seq_len:,} tokens{shared} before it"]
    named = "; ".join(source_of(corpus.files, row) for row in about[:NAMED])
    more = f"; and {len(about) - NAMED:,} more" if len(about) > NAMED else ""
    seq_key = "validation.seq_len" if table == "validation" else "training.seq_len"
    longest = about[:, FIRST].max() * together(corpus)
    longer = f"; or raise {seq_key}, of which they need up to {longest:,}" if never < len(about) else ""
    drop = "" if dropped.all() else 'set data.empty_mask = "drop" to train without them, or '
    raise DataError(
        f"[{table}] {len(about):,} of {len(empty):,} conversations have no token in the loss: "
        f"{' and '.join(reasons)}: {named}{more}\n  fix:  {drop}correct them{longer}"
    )


def source_of(files: tuple[str, ...], about: np.ndarray) -> str:
    """Return the source of the conversation ``about``: its file, and its line or row."""
    name = files[about[FILE]]
    return f"{name}, {unit_of(Path(name))} {about[ROW]}"
