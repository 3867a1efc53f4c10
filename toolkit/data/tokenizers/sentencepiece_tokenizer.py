"""Tokenizers defined by a SentencePiece model."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from toolkit.data.tokenizers.files import TokenizerFiles
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece tokenizer. A text is encoded with a space before it, and decoded without that space.

    Therefore only complete sequences decode exactly: a continuation that starts with a word loses its space.
    """

    def __init__(self, files: TokenizerFiles):
        self._model = sentencepiece_processor(files)
        pieces = self._model.get_piece_size()
        special = {
            self._model.id_to_piece(token): token
            for token in range(pieces)
            if self._model.is_control(token) or self._model.is_unknown(token)
        }
        special.update({name: token for name, token in files.added.items() if token >= pieces})
        super().__init__(files, max([pieces - 1, *special.values()]) + 1, special)

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def _decode(self, ids: list[int]) -> str:
        # The library returns no text for control tokens and does not know added tokens.
        texts: list[str] = []
        for special, group in groupby(ids, key=self._special_names.__contains__):
            run = list(group)
            if special:
                texts += [self._special_names[token] for token in run]
                continue
            # After a special token the space belongs to the text, as in "<s> [INST]".
            spaced = texts and self._model.id_to_piece(run[0]).startswith("\u2581")
            texts += [" " if spaced else "", self._model.decode(run)]
        return "".join(texts)

    def _offsets(self, ids: list[int], text: str) -> list[tuple[int, int]]:
        offsets, place = [], -1  # the space before the text is not one of its characters
        for token in ids:
            piece = self._model.id_to_piece(token)
            begin = max(0, place)
            if self._model.is_byte(token):
                first = int(piece[3:5], 16) & 0xC0 != 0x80
                begin -= 0 if first else 1
                place += first
            else:
                place += len(piece)
            offsets.append((begin, place))
        if ids and place != len(text):
            raise DataError(
                f"the tokenizer {self.path} normalizes text, so its tokens cannot be located in it: "
                f"{text[:60]!r}"
            )
        return offsets


def sentencepiece_processor(files: TokenizerFiles) -> SentencePieceProcessor:
    """Load the SentencePiece model of ``files``."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=files.content)
    except RuntimeError as error:
        raise DataError(
            f"{files.path} ({len(files.content):,} bytes) is not a complete SentencePiece model: {error}"
        ) from error
