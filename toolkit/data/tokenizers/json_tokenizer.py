"""Tokenizers that come as a tokenizer.json."""

from __future__ import annotations

import os

from toolkit.data.tokenizers.files import TokenizerFiles, json_vocabulary_size
from toolkit.data.tokenizers.tokenizer import Tokenizer, without_surrogates
from toolkit.errors import DataError


class JsonTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``, run by the tokenizers library.

    Its template, truncation and padding do not apply, and its special tokens are not looked for in text.
    """

    def __init__(self, files: TokenizerFiles):
        # Corpora are tokenised by processes, not by this library's threads: those start on a first batch
        # and a fork after it would hang or warn. Whoever wants them sets the variable.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        size = json_vocabulary_size(files)
        try:
            self._backend = tokenizers.Tokenizer.from_buffer(files.content)
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"{files.path} cannot be read by tokenizers: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        declared = self._backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in sorted(declared.items()) if token.special}
        super().__init__(files, size, special)

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_after(self, special: int, text: str) -> list[int]:
        if any(name in text for name in self.special_tokens):  # which would be looked for
            return super().encode_after(special, text)
        self._backend.encode_special_tokens = False
        ids = self._backend.encode(
            self._special_names[special] + without_surrogates(text), add_special_tokens=False
        ).ids
        self._backend.encode_special_tokens = True
        return ids[1:]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)
