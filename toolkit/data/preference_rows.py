"""Rows of preferences, for KTO and for reward models; other objectives read pairs as conversations.

KTO estimates how far the model has moved from its reference on answers to other prompts. The mismatched
answer for a prompt is that of the preceding conversation in the corpus (for the first: of the last) or, if
both answers of a pair are in use, of the preceding pair. The mismatched answer does not depend on the batch:
this is trl's rotation, applied to the corpus instead of the micro-batch. In a row, the document of a prompt
with its mismatched answer has the same number as that of the prompt with its own answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.data.chat.empty_masks import FILE, FIRST, ROW
from toolkit.data.conversation_rows import ConversationRows
from toolkit.data.packing import Sample
from toolkit.data.token_files import TokenCache
from toolkit.loss import IGNORED_LABEL

MISMATCHED = "mismatched_"
"""Prefix of the fields of mismatched answers."""


class UnpairedRows(ConversationRows):
    """Rows of whole conversations; ``desirable`` (seq_len,) is the label of the answer in each document."""

    def _rooms(self, corpus: TokenCache, kept: np.ndarray, places: np.ndarray) -> np.ndarray:
        assert corpus.conversations is not None and corpus.labels is not None
        self.labels, self.first = corpus.labels, corpus.conversations[:, FIRST]
        sources = corpus.conversations[kept][:, [FILE, ROW]]
        same = (sources[1:] == sources[:-1]).all(axis=1)  # as the conversation before: a pair
        paired = np.r_[False, same] | np.r_[same, False]
        others = kept[(np.arange(len(kept)) - 1 - paired) % len(kept)]
        self.others = np.zeros(len(corpus.offsets) - 1, np.int64)
        self.others[kept] = others
        answers = corpus.offsets[others + 1] - corpus.offsets[others] - self.first[others]
        return np.maximum(places, np.minimum(self.first[kept] + answers - 1, self.seq_len))

    def blank(self) -> Sample:
        row = super().blank()
        mismatched = {f"{MISMATCHED}{name}": values.copy() for name, values in row.items()}
        return row | mismatched | {"desirable": np.zeros(self.seq_len, np.bool_)}

    def sample(self, k: int) -> Sample:
        row, place = super().sample(k), 0
        there = self.indices(k)
        row["desirable"][: len(there)] = self.labels[there]
        for number, index in enumerate(there):
            prompt = slice(self.offsets[index], self.offsets[index] + self.first[index])
            other = self.others[index]
            answer = slice(self.offsets[other] + self.first[other], self.offsets[other + 1])
            tokens = np.concatenate([self.tokens[prompt], self.tokens[answer]])[: self.seq_len + 1]
            mask = np.concatenate([np.zeros(self.first[index], np.uint8), self.mask[answer]])
            n = len(tokens) - 1
            values = {
                "tokens": tokens[:-1],
                "labels": np.where(mask[1 : n + 1], tokens[1:].astype(np.int64), IGNORED_LABEL),
                "positions": self._arange[:n],
                "documents": number,
            }
            for name, value in values.items():
                row[f"{MISMATCHED}{name}"][place : place + n] = value
            place += n
        return row


class ScoredRows(ConversationRows):
    """Rows of pairs for a reward model. The last token of each answer is an input with the label 0, the only
    score; other tokens have no label. ``margin`` (seq_len,) is that of each document."""

    predicted = 0

    def __init__(self, corpus: TokenCache, seq_len: int, **options: Any):
        super().__init__(corpus, seq_len, **options)
        assert corpus.margins is not None
        self.margins = corpus.margins

    def blank(self) -> Sample:
        return super().blank() | {"margin": np.zeros(self.seq_len, np.float32)}

    def sample(self, k: int) -> Sample:
        row, place, there = self.blank(), 0, self.indices(k)
        row["margin"][: len(there)] = self.margins[there]
        lengths = self.places[self.starts[k] : self.starts[k + 1]]
        for number, (index, n) in enumerate(zip(there, lengths, strict=True)):
            here, begin = slice(place, place + n), int(self.offsets[index])
            row["tokens"][here] = self.tokens[begin : begin + n]
            row["positions"][here] = self._arange[:n]
            row["documents"][here] = number
            place += n
            row["labels"][place - 1] = 0
        return row


def conversation_rows(corpus: TokenCache, seq_len: int, **options: Any) -> ConversationRows:
    """Return the rows of a corpus of conversations, of labeled answers, or of pairs for a reward model."""
    if corpus.margins is not None:
        return ScoredRows(corpus, seq_len, **options)
    kind = ConversationRows if corpus.labels is None else UnpairedRows
    return kind(corpus, seq_len, **options)
