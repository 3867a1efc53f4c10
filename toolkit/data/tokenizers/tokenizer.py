"""Tokenizers: tiktoken, SentencePiece and Hugging Face files behind one interface.

:func:`toolkit.data.tokenizers.load_tokenizer.load_tokenizer` finds the files (``files.py`` describes their
order and kinds) and returns a :class:`Tokenizer`. Ids are exactly those of the kind's own library.

Rules for all kinds:

* Text is text, so ``encode`` never converts "<|eot_id|>" or "</s>" in a text to the special token. To compose
  a prompt, take ids from ``special_tokens``.
* BOS and EOS are added only on request. To encode plain text for training, generation or scoring, request BOS
  if ``adds_bos``, which the tokenizer's files determine, is True.
* ``decode(encode(text))`` returns any Unicode text unchanged, with two exceptions. A lone surrogate (half a
  UTF-16 pair, which is not valid Unicode) becomes U+FFFD, as in tiktoken. SentencePiece represents a space as
  U+2581, so a U+2581 in the text becomes a space.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

from toolkit.data.tokenizers.files import TokenizerFiles, adds_bos
from toolkit.errors import DataError

# Names of special tokens by role, if tokenizer_config.json does not define them. A document ends with
# <|end_of_text|> even if an instruct model's tokenizer_config.json has <|eot_id|>, the end of a turn.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")
_PAD_NAMES = ("<|finetune_right_pad_id|>", "<|finetune_right_pad|>", "<pad>", "[PAD]")
_STOP_NAMES = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")


class Tokenizer(ABC):
    """Converts text to ids and back.

    Attributes:
        path: File from which it was loaded.
        folder: Folder of the model's files.
        kind: "tiktoken", "sentencepiece" or "json".
        n_words: Number of tokens including special ones; ids are 0 to ``n_words - 1``.
        special_tokens: Name → id of every special token.
        bos_id, eos_id, pad_id: Ids of these roles; None if the tokenizer has no such token.
        adds_bos: Whether plain text starts with BOS.
        stop_ids: Ids that end generation: end of document, turn or message.
        fingerprint: SHA-256 of kind, file content, EOS, and the BOS at the start of texts. Equal
            fingerprints mean equal token files.
    """

    _version = ""  # change it when the ids of texts change

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
        if files.named.get("bos") == "" and not self.adds_bos:  # null: a token with such a name is not BOS
            self.bos_id = None
        self.eos_id = role("eos", _EOS_NAMES, preferred=_EOS_NAMES[0])
        self.pad_id = role("pad", _PAD_NAMES)
        stops = {special_tokens[name] for name in _STOP_NAMES if name in special_tokens}
        self.stop_ids = tuple(sorted(stops | ({self.eos_id} if self.eos_id is not None else set())))
        self._special_names = {token: name for name, token in special_tokens.items()}
        begins = self.bos_id if self.adds_bos else None
        head = f"{self.kind}{self._version}\0{begins}\0{self.eos_id}\0".encode()
        self.fingerprint = hashlib.sha256(head + files.content).hexdigest()

    def encode(self, text: str, bos: bool = False, eos: bool = False) -> list[int]:
        """Encode ``text``, optionally with BOS before and EOS after it.

        Raises:
            DataError: BOS or EOS is requested, but the tokenizer has none.
        """
        ids = self._encode(without_surrogates(text))
        return [*self._role_id("BOS", self.bos_id, bos), *ids, *self._role_id("EOS", self.eos_id, eos)]

    def encode_after(self, special: int, text: str) -> list[int]:
        """Encode ``text`` after the token ``special``. Hugging Face tokenizers may put a space only before
        the first word of a prompt, or strip spaces after a token."""
        return self._encode(without_surrogates(text))

    def encode_with_offsets(
        self, text: str, after: int | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode ``text``, at the start of a prompt or after the special token ``after``, with the character
        range of each token.

        A character encoded as several tokens is in the range of each.

        Raises:
            DataError: The tokenizer normalizes this text, so its tokens cannot be located in it.
        """
        text = without_surrogates(text)
        ids = self.encode(text) if after is None else self.encode_after(after, text)
        return ids, self._offsets(ids, text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts without BOS and EOS, on the calling thread: the fast path for a corpus."""
        return self._encode_batch([without_surrogates(text) for text in texts])

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Decode ``ids``; special tokens appear by name, or are omitted with ``skip_special``.

        Invalid UTF-8 (incomplete characters) appears as U+FFFD.

        Raises:
            DataError: An id is outside the vocabulary.
        """
        if wrong := [token for token in ids if not 0 <= token < self.n_words]:
            raise DataError(
                f"token id {wrong[0]} is not in the tokenizer's vocabulary of {self.n_words:,} tokens "
                f"({self.path}); were the ids made with this tokenizer?"
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
        """Encode a text that has no surrogates."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Decode ``ids``; special tokens appear by name."""

    @abstractmethod
    def _offsets(self, ids: list[int], text: str) -> list[tuple[int, int]]:
        """Return the character range of each of ``ids`` in ``text``, which has no surrogates."""


def without_surrogates(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD, as tiktoken does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
