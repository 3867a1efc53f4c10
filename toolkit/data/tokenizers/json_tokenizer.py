"""Tokenizers defined by a tokenizer.json."""

from __future__ import annotations

import os
from typing import Any

from toolkit.data.tokenizers.files import TokenizerFiles
from toolkit.data.tokenizers.json_files import json_vocabulary_size, tokenizers_errors
from toolkit.data.tokenizers.tokenizer import Tokenizer, without_surrogates


class JsonTokenizer(Tokenizer):
    """A Hugging Face ``tokenizer.json``, run by the tokenizers library.

    Its template, truncation and padding are not applied; special tokens in text are not recognized.
    """

    _version = "2"  # version 1 recognized special tokens in text in processes that tokenized a corpus

    def __init__(self, files: TokenizerFiles):
        # Corpora are tokenized by several processes, not by this library's threads: threads start on the
        # first batch, and a fork after that would hang or warn. Set the variable to enable threads.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        size = json_vocabulary_size(files.content, files.path)
        with tokenizers_errors(files.path):
            self._backend = tokenizers.Tokenizer.from_buffer(files.content)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        declared = self._backend.get_added_tokens_decoder()
        special = {token.content: index for index, token in sorted(declared.items()) if token.special}
        super().__init__(files, size, special)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._backend.encode_special_tokens = True  # the library does not pickle it

    def _encode(self, text: str) -> list[int]:
        with tokenizers_errors(self.path):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_after(self, special: int, text: str) -> list[int]:
        if any(name in text for name in self.special_tokens):  # the library would encode them as special
            return super().encode_after(special, text)
        self._backend.encode_special_tokens = False
        ids = self._encode(self._special_names[special] + without_surrogates(text))
        self._backend.encode_special_tokens = True
        return ids[1:]

    def encode_with_offsets(
        self, text: str, after: int | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        text = without_surrogates(text)
        name = "" if after is None else self._special_names[after]
        if any(special in text for special in self.special_tokens):  # as in encode_after
            name = ""
        self._backend.encode_special_tokens = not name
        encoding = self._backend.encode(name + text, add_special_tokens=False)
        self._backend.encode_special_tokens = True
        skipped, n = 1 if name else 0, len(name)
        return encoding.ids[skipped:], [(begin - n, end - n) for begin, end in encoding.offsets[skipped:]]

    def _offsets(self, ids: list[int], text: str) -> list[tuple[int, int]]:
        return self._backend.encode(text, add_special_tokens=False).offsets

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        with tokenizers_errors(self.path):
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]

    def _decode(self, ids: list[int]) -> str:
        with tokenizers_errors(self.path):
            return self._backend.decode(ids, skip_special_tokens=False)
