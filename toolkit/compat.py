"""Stand-ins for what the standard library of Python 3.10 lacks; this file goes when 3.10 does."""

from __future__ import annotations

import sys

__all__ = ["file_digest", "tomllib"]

if sys.version_info >= (3, 11):
    from hashlib import file_digest

    import tomllib
else:
    import hashlib
    from collections.abc import Callable
    from typing import Any, BinaryIO

    import tomli as tomllib

    def file_digest(file: BinaryIO, kind: str | Callable[[], Any]) -> Any:
        digest = hashlib.new(kind) if isinstance(kind, str) else kind()
        block = memoryview(bytearray(1 << 18))
        while size := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:size])
        return digest
