"""The rows of a JSON file that is one array, as blocks of its own bytes.

The comma between two rows becomes :data:`BETWEEN`, the brackets around all of them become spaces, and every
other byte stays where it is, so that lines and offsets are those of the file. Memory holds a block and a row.
Rows are only passed over here; whoever reads them parses them, and reports what is no JSON.
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
"""Stands between two rows. JSON allows this character nowhere, not even in a string."""
ROW_BYTES = 64 << 20
"""Limit of a row. Where a quote or bracket is missing, a row would otherwise be the rest of the file."""
_LINES = "write one JSON object per line (.jsonl)"
_CUT = 16  # characters before the end in which a mistake may only be a word or an escape that is cut
_BLANK = " \t\r\n"
_SPACE = re.compile(f"[{_BLANK}]*")
_pass_over = json.JSONDecoder(strict=False, parse_int=len, parse_float=len).raw_decode


def begins_array(head: bytes) -> bool:
    """Say if a file that begins so is an array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n").startswith(b"[")


def array_blocks(path: Path, stream: BinaryIO, head: bytes, size: int) -> Iterator[tuple[bytes, bool]]:
    """The rows of the array that begins with ``head`` and goes on in ``stream``, in blocks of ``size`` bytes
    or a little more, each with True. All but the last end with :data:`BETWEEN`. A row that is no JSON has all
    that was read after it, and ends them.

    Raises:
        DataError: the array does not end, or something follows it; a row is larger than :data:`ROW_BYTES`.
    """
    text = head.decode("latin-1").replace("[", " ", 1)  # a byte is a character, and marks of JSON are ASCII
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
                rule = f"row {rows} has more than {ROW_BYTES:,} bytes, or a quote or bracket of it is missing"
                raise DataError(f"{path}: {rule}\n  fix:  repair the file, or {_LINES}")
            more = stream.read(max(size, len(text)))
            if not more and _is_row(text, at):
                rule = f"its array does not end: neither a comma nor a bracket follows row {rows}"
                raise DataError(f"{path}: {rule}\n  fix:  repair the file")
            if not more:
                yield text.encode("latin-1"), True
                return
            text += more.decode("latin-1")


def _row_end(text: str, at: int, *, first: bool) -> int | None:
    """Where the comma or bracket after the row at ``at`` is, or the bracket of an array without rows; None if
    that is not read yet.

    Raises:
        ValueError: no row is there.
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
    found = _SPACE.match(text, at)
    assert found
    return found.end()


def _check_end(path: Path, rest: bytes, stream: BinaryIO, size: int) -> None:
    """Raise DataError where anything follows the array."""
    while not rest.strip():
        if not (rest := stream.read(size)):
            return
    fix = f"write one array of all objects, or {_LINES}"
    raise DataError(f"{path}: something follows the array that begins it\n  fix:  {fix}")
