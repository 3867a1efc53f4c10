"""Rows of a JSON file that consists of one array, in blocks of the file's bytes.

The comma between two rows becomes :data:`BETWEEN`, and the brackets around the array become spaces. Every
other byte is unchanged, so lines and offsets are those of the file. Memory use is one block plus one row.
Rows are only delimited here; the reader of a row parses it and reports invalid JSON.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from toolkit.errors import DataError

BETWEEN = "\x1e"
"""Separator of two rows, a character that JSON does not allow, not even in strings."""
ROW_BYTES = 64 << 20
"""Maximum size of a row. With a missing quote or bracket, a row would otherwise extend to the end of the
file."""
_LINES = "write one JSON object per line (.jsonl)"
_CUT = 16  # characters before the end where an error may just be a truncated word or escape
_BLANK = " \t\r\n"
_SPACE = re.compile(f"[{_BLANK}]*")
_pass_over = json.JSONDecoder(strict=False, parse_int=len, parse_float=len).raw_decode


def begins_array(head: bytes) -> bool:
    """Return whether a file that starts with ``head`` is an array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n").startswith(b"[")


def array_blocks(path: Path, stream: BinaryIO, head: bytes, size: int) -> Iterator[tuple[bytes, bool]]:
    """Yield (block, True) for each block of rows of the array that starts with ``head`` and continues in
    ``stream``.

    Blocks have ``size`` bytes or slightly more; all but the last end with :data:`BETWEEN`. A row of invalid
    JSON includes everything read after it, and is the last.

    Raises:
        DataError: The array does not end, something follows it, or a row is larger than :data:`ROW_BYTES`.
    """
    text = head.decode("latin-1").replace("[", " ", 1)  # one character per byte; JSON's syntax is ASCII
    at, rows, ended = len(codecs.BOM_UTF8) * head.startswith(codecs.BOM_UTF8), 0, False
    while not ended:
        begin, parts = 0, [""]
        try:
            while (end := _row_end(text, at, first=not rows)) is not None and text[end] == ",":
                parts += [text[begin:end], BETWEEN]
                begin = at = end + 1
                rows += 1
        except ValueError:
            parts, ended = [*parts, text[begin:]], True
        else:
            if end is not None:
                _check_end(path, text[end + 1 :].encode("latin-1"), stream, size)
                if rows or text[at:end].strip(_BLANK):
                    parts += [text[begin:end], " "]
                ended = True
        if block := "".join(parts).encode("latin-1"):
            yield block, True
        if not ended:
            text, at = text[begin:], at - begin
            if len(text) > ROW_BYTES:
                rule = f"row {rows} has more than {ROW_BYTES:,} bytes, or a missing quote or bracket"
                raise DataError(f"{path}: {rule}\n  fix:  repair the file, or {_LINES}")
            more = stream.read(max(size, len(text)))
            if not more and _is_row(text, at):
                rule = f"its array does not end: no comma or bracket follows row {rows}"
                raise DataError(f"{path}: {rule}\n  fix:  repair the file")
            if not more:
                yield text.encode("latin-1"), True
                return
            text += more.decode("latin-1")


def _row_end(text: str, at: int, *, first: bool) -> int | None:
    """Return the index of the comma or bracket after the row at ``at``, or of the bracket that closes an
    empty array; None if more text is needed.

    Raises:
        ValueError: There is no valid row.
    """
    begin = _after_space(text, at)
    if first and text[begin : begin + 1] == "]":
        return begin
    try:
        _, end = _pass_over(text, begin)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or error.pos > len(text) - _CUT:
            return None
        raise
    except RecursionError:
        raise ValueError from None
    end = _after_space(text, end)
    if end < len(text) and text[end] not in ",]":
        raise ValueError
    return end if end < len(text) else None


def _is_row(text: str, at: int) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        return bool(_pass_over(text, _after_space(text, at)))
    return False


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match
    return match.end()


def _check_end(path: Path, rest: bytes, stream: BinaryIO, size: int) -> None:
    """Raise DataError if anything follows the array."""
    while not rest.strip():
        if not (rest := stream.read(size)):
            return
    fix = f"write one array of all objects, or {_LINES}"
    raise DataError(f"{path}: something follows the array that begins it\n  fix:  {fix}")
