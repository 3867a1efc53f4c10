"""Text as its tokens come."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from toolkit.generation.text import TextStream


def test_emoji_in_a_row_of_a_tokenizer_that_has_their_bytes_alone() -> None:
    """As the tokenizer.json of TinyLlama: no byte that follows a part of a character is read."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for text in ("😀" * 9, "hi 日本語 😀😀😀é😀 — yes", "é" * 20):
        stream = TextStream(lambda ids: tokenizer.decode(list(ids)))
        assert [*map(stream.add, text.encode()), stream.rest()] == [
            piece for character in text for piece in [""] * (len(character.encode()) - 1) + [character]
        ] + [""]
