"""Strings that reach every plane of Unicode and the corners where tokenizers differ, from one seed."""

from __future__ import annotations

import random

_CORNERS = [
    "", " ", "  ", "\n", "\r\n", " \n ", "\t\t", "\x00", "\x1f", "\x7f", "\x85", "\u00a0", "\u2028", "\ufeff",
    "I'll", "we'VE", "don't", "12345", "١٢٣٤", "x²", "a\u0301\u0302", "e\u0301", "ﬁ", "ß", "İ", "Ǆ",
    "שָׁלוֹם", "مرحبا", "\u202eabc\u202c", "नमस्ते", "สวัสดี", "한국어", "각", "日本語", "漢字かな", "𠀀",
    "👩\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "👍🏽", "🇩🇪", "1\ufe0f\u20e3",
    "\u200d", "\ufe0f", "\U000e0001", "\U0010ffff", "\uffff",
    "<|begin_of_text|>", "<|eot_id|>", "<s>", "</s>", "<unk>", "<0x0A>", "Ġ",
    "▂", "a" * 40, " " * 33, "\n" * 9,
]  # fmt: skip
_WORDS = [
    "the", "of", "Whale", "and", "Emma", "said", "'twas", "KING", "isn't", "1,234", "3.14", "http://a.b/c?d=e",
    "{x: [y]}", "--",
]  # fmt: skip


def unicode_strings(count: int, seed: int) -> list[str]:
    """``count`` strings; the first 17 hold a sample of plane 0, 1, … 16, the rest mix all kinds of chunks.

    No surrogates, and no U+2581, which SentencePiece reads as a space.
    """
    source = random.Random(seed)

    def code_point(plane: int) -> str:
        while True:
            point = plane * 0x10000 + source.randrange(0x10000)
            if not 0xD800 <= point <= 0xDFFF and point != 0x2581:
                return chr(point)

    def chunk() -> str:
        kind = source.randrange(6)
        if kind == 0:
            return code_point(source.randrange(17))
        if kind == 1:
            return chr(source.randrange(0x250))
        if kind == 2:
            # A script is a block: neighbours meet as they do in text.
            start = ord(code_point(source.choice((0, 0, 1, 2)))) & ~0x3F
            points = [start + source.randrange(0x40) for _ in range(4)]
            return "".join(chr(p) for p in points if not 0xD800 <= p <= 0xDFFF and p != 0x2581)
        if kind == 3:
            return source.choice(_CORNERS)
        return source.choice((" ", "")) + source.choice(_WORDS)

    planes = ["".join(code_point(plane) for _ in range(64)) for plane in range(17)]
    mixed = ["".join(chunk() for _ in range(source.randrange(1, 12))) for _ in range(count - len(planes))]
    return planes + mixed
