"""Tokenizers defined by a tiktoken file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

import tiktoken

from toolkit.data.tokenizers.files import TokenizerFiles
from toolkit.data.tokenizers.tiktoken_ranks import form_of, other_model, read_ranks, special_tokens
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.models.common.tiktoken_form import TiktokenForm

# Limits of Meta's code: characters per call of tiktoken, and length of a run of whitespace or of
# non-whitespace characters, because merging is quadratic in the length of a word.
MAX_CHARACTERS = 400_000
MAX_RUN = 25_000


class TiktokenTokenizer(Tokenizer):
    """Byte-level BPE by ranks, with the pre-tokenization regex and special tokens of ``form``."""

    def __init__(self, files: TokenizerFiles):
        ranks = read_ranks(files.content, files.path)
        form = form_of(len(ranks), files.path)
        special = special_tokens(form, len(ranks), files.folder, files.added)
        super().__init__(files, max(special.values()) + 1, special)
        self._encoding = tiktoken.Encoding(
            name=files.path.name, pat_str=form.pattern, mergeable_ranks=ranks, special_tokens=special
        )
        if len(ranks) < form.n_ranks:
            self._check_pattern(ranks, form)

    def _check_pattern(self, ranks: dict[bytes, int], form: TiktokenForm) -> None:
        """Raise DataError if a token spans several words of the pre-tokenization regex, as GPT-2's "2017"
        does.

        Ranks trained with the regex have no such token. Whitespace is not checked because its split depends
        on the next character: "\n " is part of the word "\n \n", but two words by itself.
        """
        for token, rank in ranks.items():
            try:
                text = token.decode()
            except UnicodeDecodeError:  # an incomplete character
                continue
            if not text.isspace() and self._encoding.encode_ordinary(text) != [rank]:
                raise other_model(
                    f"{self.path} has a token {text!r}, which spans words of {form.display_name}"
                )

    def _encode(self, text: str) -> list[int]:
        if len(text) <= MAX_RUN:
            return self._encoding.encode_ordinary(text)
        return [token for chunk in _chunks(text) for token in self._encoding.encode_ordinary(chunk)]

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)

    def _offsets(self, ids: list[int], text: str) -> list[tuple[int, int]]:
        lengths = [len(token) for token in self._encoding.decode_tokens_bytes(ids)]
        characters = accumulate(byte & 0xC0 != 0x80 for byte in text.encode())  # first bytes of characters
        of_byte = [number - 1 for number in characters]
        ends = zip(accumulate(lengths), lengths, strict=True)
        return [(of_byte[end - length], of_byte[end - 1] + 1) for end, length in ends]


def _chunks(text: str) -> Iterator[str]:
    """Split ``text`` as Meta's code does."""
    for start in range(0, len(text), MAX_CHARACTERS):
        part = text[start : start + MAX_CHARACTERS]
        cuts = [0, *_cuts_in_runs(part), len(part)]
        yield from (part[a:b] for a, b in zip(cuts, cuts[1:], strict=False))


def _cuts_in_runs(text: str) -> list[int]:
    """Return the split positions of runs of whitespace, or of non-whitespace, longer than MAX_RUN
    characters."""
    # A run longer than MAX_RUN fills at least one of these blocks. In ordinary text, each block is left at
    # its second word, which avoids a loop over all runs.
    half = MAX_RUN // 2
    blocks = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    if not any(block.isspace() or re.search(r"\s", block) is None for block in blocks):
        return []
    runs = (match.span() for match in re.finditer(r"\s+|\S+", text))
    return [cut for start, end in runs for cut in range(start + MAX_RUN, end, MAX_RUN)]
