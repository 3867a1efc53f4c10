"""Tokenizers: tiktoken, SentencePiece and Hugging Face files behind one small interface.

:func:`toolkit.data.tokenizers.load_tokenizer.load_tokenizer` looks into a folder (``files.py`` has the order
and the kinds) and gives a :class:`Tokenizer`. Ids are exactly those of the library that defines the kind.

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
from abc import ABC, abstractmethod
from collections.abc import Sequence

from toolkit.data.tokenizers.files import TokenizerFiles, adds_bos
from toolkit.errors import DataError

# Names by which a role is known when tokenizer_config.json does not say. The end of a document is
# <|end_of_text|> even where an instruct model's tokenizer_config.json names <|eot_id|>, the end of a turn.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>")
_EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")
_PAD_NAMES = ("<|finetune_right_pad_id|>", "<|finetune_right_pad|>", "<pad>", "[PAD]")
_STOP_NAMES = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|eom|>", "<|eot|>")


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

    _version = ""  # another one where texts become other ids than before

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
        if files.named.get("bos") == "" and not self.adds_bos:  # null: a token of such a name is another
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
        """Ids of ``text``, with BOS before and EOS after where asked for.

        Raises:
            DataError: BOS or EOS asked for, and the tokenizer has none.
        """
        ids = self._encode(without_surrogates(text))
        return [*self._role_id("BOS", self.bos_id, bos), *ids, *self._role_id("EOS", self.eos_id, eos)]

    def encode_after(self, special: int, text: str) -> list[int]:
        """Ids of ``text`` where it follows the token ``special``: Hugging Face tokenizers may put a space
        before the first word of a prompt alone, or drop those after a token."""
        return self._encode(without_surrogates(text))

    def encode_with_offsets(
        self, text: str, after: int | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of ``text``, at the start of a prompt or where it follows the special token ``after``, and
        which characters each is of, from begin to end. A character that is several tokens is of all of them.

        Raises:
            DataError: the tokenizer rewrites this text, so that its tokens cannot be found in it.
        """
        text = without_surrogates(text)
        ids = self.encode(text) if after is None else self.encode_after(after, text)
        return ids, self._offsets(ids, text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text without BOS and EOS, on the calling thread: the fast path for a corpus."""
        return self._encode_batch([without_surrogates(text) for text in texts])

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

    @abstractmethod
    def _offsets(self, ids: list[int], text: str) -> list[tuple[int, int]]:
        """Begin and end, in characters of ``text``, which has no surrogates, of each of its ``ids``."""


def without_surrogates(text: str) -> str:
    """``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD, as tiktoken does."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
