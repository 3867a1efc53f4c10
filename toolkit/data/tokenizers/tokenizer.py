"""Tokenizers: tiktoken, SentencePiece and Hugging Face files behind one small interface.

``load_tokenizer(folder)`` looks into the folder (:mod:`toolkit.data.tokenizers.files` has the order and
the kinds) and gives a :class:`Tokenizer`. Ids are exactly those of the library that defines the kind.

Rules common to all kinds:

* Text is text: ``encode`` never turns "<|eot_id|>" or "</s>" in a text into the special token. Whoever
  composes a prompt takes the ids from ``special_tokens``.
* BOS and EOS are added when asked for and never otherwise. Whoever encodes a plain text, to train on,
  to go on from or to score, asks for BOS where ``adds_bos`` says so: the folder's files decide it.
* Any Unicode text comes back from ``decode(encode(text))``, with two exceptions. A lone surrogate
  (half a UTF-16 pair, which is no Unicode text) becomes U+FFFD, as in tiktoken. SentencePiece
  writes a space as U+2581, so a U+2581 of the text comes back as a space.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from toolkit.data.tokenizers.files import (
    N_LLAMA3_RANKS,
    PAD_LLAMA3,
    PAD_LLAMA4,
    Kind,
    TokenizerFiles,
    adds_bos,
    check_ranks,
    find,
    json_vocabulary_size,
    not_llamas,
    read_ranks,
    sentencepiece_processor,
    tiktoken_pattern,
    tiktoken_special_tokens,
    vocabulary_size,
)
from toolkit.errors import DataError

__all__ = ["Tokenizer", "load_tokenizer", "vocabulary_size"]

# Meta's Llama 3 code hands tiktoken at most so many characters, and at most so many consecutive
# characters that are all whitespace or all not: merging is quadratic in the length of a word.
MAX_CHARACTERS = 400_000
MAX_RUN = 25_000

# Names by which a role is known when tokenizer_config.json does not say. The end of a document is
# <|end_of_text|> even where an instruct model's tokenizer_config.json names <|eot_id|>, the end of a turn.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")
_PAD_NAMES = (PAD_LLAMA3, PAD_LLAMA4, "<pad>", "[PAD]")
_STOP_NAMES = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")


def load_tokenizer(path: str | Path, *, add_bos: bool | None = None) -> Tokenizer:
    """The tokenizer in a folder (``model.hf_assets_path``), or in the file itself; ``add_bos`` has plain
    texts begin with BOS, or not, whatever the folder says.

    Raises:
        DataError: none there, or a file that is damaged or of no known kind, or without the BOS asked for.
    """
    files = replace(find(path), add_bos=add_bos)
    kinds: dict[Kind, Callable[[TokenizerFiles], Tokenizer]] = {
        "tiktoken": TiktokenTokenizer,
        "sentencepiece": SentencePieceTokenizer,
        "json": JsonTokenizer,
    }
    return kinds[files.kind](files)


class Tokenizer(ABC):
    """Text to ids and back.

    Attributes:
        path: the file it was read from.
        folder: where the model files that belong to it are.
        kind: "tiktoken", "sentencepiece" or "json".
        n_words: entries, special tokens included: ids are 0 to ``n_words - 1``.
        special_tokens: name → id of every special token.
        bos_id, eos_id, pad_id: ids of these roles; None where the tokenizer has no such token.
        adds_bos: whether a plain text begins with BOS.
        stop_ids: ids at which generation ends: end of document, of turn, of message.
        fingerprint: SHA-256 over kind, file content, the BOS that texts begin with and EOS: equal means
            equal token files.
    """

    def __init__(self, files: TokenizerFiles, n_words: int, special_tokens: dict[str, int]):
        self.path = files.path
        self.folder = files.folder
        self.kind = files.kind
        self.n_words = n_words
        self.special_tokens = special_tokens

        def role(role: str, known: Sequence[str], preferred: str | None = None) -> int | None:
            names = (preferred, files.named.get(role), *known)
            return next((special_tokens[name] for name in names if name in special_tokens), None)

        self.bos_id = role("bos", _BOS_NAMES)
        self.adds_bos = adds_bos(files, self.bos_id)
        self.eos_id = role("eos", _EOS_NAMES, preferred=_EOS_NAMES[0])
        self.pad_id = role("pad", _PAD_NAMES)
        stops = {special_tokens[name] for name in _STOP_NAMES if name in special_tokens}
        self.stop_ids = tuple(sorted(stops | ({self.eos_id} if self.eos_id is not None else set())))
        self._special_names = {token: name for name, token in special_tokens.items()}
        begins = self.bos_id if self.adds_bos else None
        head = f"{self.kind}\0{begins}\0{self.eos_id}\0".encode()
        self.fingerprint = hashlib.sha256(head + files.content).hexdigest()

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Ids of ``text``, with BOS before and EOS after where asked for.

        Raises:
            DataError: BOS or EOS asked for, and the tokenizer has none.
        """
        ids = self._encode(_without_surrogates(text))
        return [*self._role_id("BOS", self.bos_id, bos), *ids, *self._role_id("EOS", self.eos_id, eos)]

    def encode_after(self, special: int, text: str) -> list[int]:
        """Ids of ``text`` where it follows the token ``special``: Hugging Face tokenizers may put a space
        before the first word of a prompt alone, or drop those after a token."""
        return self._encode(_without_surrogates(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without BOS and EOS, on the calling thread: the fast path for a corpus."""
        return self._encode_batch([_without_surrogates(text) for text in texts])

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ``ids``; special tokens appear by name, or not at all with ``skip_special``.

        Bytes that are no UTF-8 (a character cut in two) appear as U+FFFD.

        Raises:
            DataError: an id outside the vocabulary.
        """
        if wrong := [token for token in ids if not 0 <= token < self.n_words]:
            raise DataError(
                f"token id {wrong[0]} is not in the tokenizer's vocabulary of {self.n_words:,} entries "
                f"({self.path}); is this the tokenizer the ids were made with?"
            )
        return self._decode([token for token in ids if not skip_special or token not in self._special_names])

    def _role_id(self, role: str, token: int | None, wanted: bool) -> list[int]:
        if not wanted:
            return []
        if token is None:
            raise DataError(f"the tokenizer {self.path} has no {role} token")
        return [token]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Ids of a text that has no surrogates."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Text of ``ids``, special tokens by name."""


class TiktokenTokenizer(Tokenizer):
    """Llama 3's and Llama 4's: byte-level BPE by ranks, with the word pattern and special tokens that belong
    to so many."""

    def __init__(self, files: TokenizerFiles):
        import tiktoken

        ranks = read_ranks(files.content, files.path)
        check_ranks(len(ranks), files.path)
        special = tiktoken_special_tokens(files, len(ranks))
        super().__init__(files, max(special.values()) + 1, special)
        pattern = tiktoken_pattern(len(ranks))
        self._encoding = tiktoken.Encoding(
            name=files.path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        if len(ranks) < N_LLAMA3_RANKS:
            self._refuse_other_pattern(ranks)

    def _refuse_other_pattern(self, ranks: dict[bytes, int]) -> None:
        """Ranks learnt for the word pattern have no token that it cuts in two, as GPT-2's have "2017". White
        space is cut by what comes after it: "\\n " is part of the word "\\n \\n", and two words alone."""
        for token, rank in ranks.items():
            try:
                text = token.decode()
            except UnicodeDecodeError:  # part of a character
                continue
            if not text.isspace() and self._encoding.encode_ordinary(text) != [rank]:
                raise not_llamas(f"{self.path} has a token {text!r}, which Llama 3's words do not have")

    def _encode(self, text: str) -> list[int]:
        if len(text) <= MAX_RUN:
            return self._encoding.encode_ordinary(text)
        return [token for piece in _pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


class SentencePieceTokenizer(Tokenizer):
    """Llama 2's. A text is encoded with a space before it, and decoded without that one.

    So only whole sequences decode faithfully: a continuation that begins with a word loses its space.
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
        # The library gives nothing for control tokens and knows none that were added.
        texts: list[str] = []
        for special, group in groupby(ids, key=self._special_names.__contains__):
            run = list(group)
            if special:
                texts += [self._special_names[token] for token in run]
                continue
            # After a special token the space belongs to the text: Llama 2's "<s> [INST]".
            spaced = texts and self._model.id_to_piece(run[0]).startswith("\u2581")
            texts += [" " if spaced else "", self._model.decode(run)]
        return "".join(texts)


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
            self._special_names[special] + _without_surrogates(text), add_special_tokens=False
        ).ids
        self._backend.encode_special_tokens = True
        return ids[1:]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def _without_surrogates(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _pieces(text: str) -> Iterator[str]:
    """Cut ``text`` where Meta's Llama 3 code does."""
    for start in range(0, len(text), MAX_CHARACTERS):
        part = text[start : start + MAX_CHARACTERS]
        cuts = [0, *_cuts_in_runs(part), len(part)]
        yield from (part[a:b] for a, b in zip(cuts, cuts[1:], strict=False))


def _cuts_in_runs(text: str) -> list[int]:
    """Where the runs of whitespace, or of anything else, that exceed MAX_RUN characters are cut."""
    # A run longer than MAX_RUN fills at least one of these blocks; ordinary text leaves each of them
    # at its second word, which spares it the walk over all runs.
    half = MAX_RUN // 2
    blocks = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    if not any(block.isspace() or re.search(r"\s", block) is None for block in blocks):
        return []
    runs = (match.span() for match in re.finditer(r"\s+|\S+", text))
    return [cut for start, end in runs for cut in range(start + MAX_RUN, end, MAX_RUN)]
