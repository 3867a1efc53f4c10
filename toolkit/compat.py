"""Stand-ins for what the standard library of Python 3.10 lacks; this file goes when 3.10 does."""

from __future__ import annotations

import sys

__all__ = ["file_digest", "tomllib"]

if sys.version_info >= (3, 11):
    from hashlib import file_digest

    import tomllib
else:
    import hashlib
    from typing import BinaryIO

    import tomli as tomllib

    def file_digest(file: BinaryIO, name: str) -> hashlib._Hash:
        digest = hashlib.new(name)
        block = memoryview(bytearray(1 << 18))
        while size := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:size])
        return digest
