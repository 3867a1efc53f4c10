"""Segments of a text file that is too long to be tokenized at once.

The boundaries depend only on the file's bytes, not on the number of processes. A segment ends after at least
1 MiB, before the first line that does not start with whitespace. At such a line, a byte-pair tokenizer
returns the same ids as for the whole text. If none follows within another 1 MiB, the segment ends before a
space.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO


def text_segments(stream: BinaryIO, at_least: int) -> Iterator[tuple[bytes, bool]]:
    """Yield (segment, whether it is the last one) of a text file; all but the last have at least ``at_least``
    bytes."""
    carry = b""
    while data := carry + stream.read(at_least - len(carry)):
        parts, budget = [data], at_least
        while budget > 0 and not (parts[-1].endswith(b"\n") and not stream.peek(1)[:1].isspace()):  # type: ignore[attr-defined]
            if not (rest := stream.readline(budget)):
                break
            parts.append(rest)
            budget -= len(rest)
        data, carry = b"".join(parts), b""
        last = not stream.peek(1)  # type: ignore[attr-defined]
        if not last and not data.endswith(b"\n"):
            cut = _cut(data, at_least)
            data, carry = data[:cut], data[cut:]
        yield data, last
        if last:  # even if the file has grown since
            return


def _cut(data: bytes, at_least: int) -> int:
    """Return where to split inside a line: before a space near the end of the segment, else between
    characters."""
    space = data.rfind(b" ", len(data) - at_least // 2)
    if space > 0:
        return space
    cut = len(data) - 1
    while cut > len(data) - 4 and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut
