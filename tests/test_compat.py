"""Stand-ins for Python 3.10's missing functions do what those do."""

from __future__ import annotations

import hashlib

from toolkit.compat import file_digest


def test_the_digest_of_a_file_of_several_blocks(tmp_path):
    content = bytes(range(256)) * 2000 + b"the rest"
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "rb") as file:
        assert file_digest(file, "sha256").hexdigest() == hashlib.sha256(content).hexdigest()
