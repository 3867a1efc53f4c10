"""Conversations from which nothing can be learnt: they are counted and named, and refused or dropped."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from toolkit.data.text_files import unit_of
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError

NO_LOSS = -1
FILE, PLACE, FIRST, LEARNT = range(4)
"""Columns of what is kept of a conversation: the number of its file, the line or row there, its first token
with loss (NO_LOSS: it has none) and how many it has."""
NAMED = 5  # conversations that a message names


def without_loss(corpus: TokenCache, seq_len: int) -> np.ndarray:
    """Say of each conversation if it has no token to learn within a row of ``seq_len``."""
    assert corpus.conversations is not None
    first = corpus.conversations[:, FIRST]
    return (first < 0) | (first > places(corpus, seq_len))


def places(corpus: TokenCache, seq_len: int) -> np.ndarray:
    """The places that each conversation takes of a row of ``seq_len``, cut where it has no more: one fewer
    than its tokens, since the last is predicted and predicts nothing. Of a pair, which shares a row, the
    longer is cut, or both to half a row."""
    whole = np.diff(corpus.offsets) - 1
    if not corpus.paired:
        return np.minimum(whole, seq_len)
    other = whole.reshape(-1, 2)[:, ::-1].ravel()
    return np.minimum(whole, np.maximum(seq_len // 2, seq_len - other))


def together(corpus: TokenCache) -> int:
    """The number of conversations, one behind the other, that are trained on together or not at all."""
    return 2 if corpus.paired else 1


def check_conversations(corpus: TokenCache, seq_len: int, empty_mask: str, table: str) -> None:
    """See that every conversation has a token to learn, or that those which have none are to be dropped.

    Raises:
        DataError: some have none, by themselves or once they are cut, and ``empty_mask`` is "error"; or all.
    """
    assert corpus.conversations is not None
    empty = without_loss(corpus, seq_len)
    dropped = empty.reshape(-1, together(corpus)).any(axis=1)
    if not empty.any() or (empty_mask == "drop" and not dropped.all()):
        return
    about = corpus.conversations[empty]
    never = int((about[:, FIRST] < 0).sum())
    reasons = [f"{never:,} have no turn of the assistant that is learnt"] if never else []
    if never < len(about):
        shared = " that both of a pair share," if corpus.paired else ""
        reasons += [f"{len(about) - never:,} are cut at {seq_len:,} tokens{shared} before it"]
    named = "; ".join(source_of(corpus.files, row) for row in about[:NAMED])
    more = f"; and {len(about) - NAMED:,} more" if len(about) > NAMED else ""
    seq_key = "validation.seq_len" if table == "validation" else "training.seq_len"
    longest = about[:, FIRST].max() * together(corpus)
    longer = f"; or raise {seq_key}, of which they need up to {longest:,}" if never < len(about) else ""
    drop = "" if dropped.all() else 'set data.empty_mask = "drop" to train without them, or '
    raise DataError(
        f"[{table}] {len(about):,} of {len(empty):,} conversations have no token to learn: "
        f"{' and '.join(reasons)}: {named}{more}\n  fix:  {drop}correct them{longer}"
    )


def source_of(files: tuple[str, ...], about: np.ndarray) -> str:
    """Where the conversation that ``about`` tells of was read: its file, and its line or row."""
    name = files[about[FILE]]
    return f"{name}, {unit_of(Path(name))} {about[PLACE]}"
