"""Validate URLs given instead of paths.

Imports neither torch nor fsspec, and is loaded only if a value contains ``://``.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from toolkit.errors import redact

Storage: TypeAlias = bool | Literal["read"]
"""True allows object storage for reading and writing; "read" allows any readable URL."""
_URL = re.compile(r"(?:^|,)\s*([A-Za-z][A-Za-z0-9+.-]*)://([^,\s]*)")  # also in comma-separated paths
_HUB = re.compile(r"(?:https?://(?:www\.)?huggingface\.co/|hf://)(datasets/)?([\w.-]+/([\w.-]+))")
_NO_STORE = ("file", "local", "http", "https", "hf", "memory", "ftp")
"""Schemes to which a run cannot save."""
_NO_SCHEME = ":// is only allowed in URLs, after a scheme such as s3", "write a path without ://"
_CREDENTIALS = "write only the bucket and path; put credentials into the environment or profile of the store"


def is_url(text: str) -> bool:
    return _URL.match(text) is not None


def url_problem(text: str, *, storage: Storage = False) -> tuple[str, str] | None:
    """Return why a URL is not allowed, and the fix; None if it is allowed, or ``text`` is not a URL."""
    match = _URL.search(text)
    if match is None:
        return _NO_SCHEME if "://" in text else None
    scheme, path = match.groups()
    if redact(text) != text:
        return "a URL with credentials would appear in logs and checkpoints", _CREDENTIALS
    if storage == "read" and scheme not in ("file", "local"):
        return None if path else (f"{scheme}:// requires a path", f"write {scheme}://bucket/folder")
    if storage and scheme not in _NO_STORE and is_url(text):
        bucket, *rest = path.split("/")
        invalid = {".", ".."} & {bucket, *rest} or any(mark in text for mark in "*?[]#, ")
        if not bucket or invalid:
            return f"{scheme}:// requires a bucket and a path", f"write {scheme}://bucket/folder"
        return None
    rule = f"{scheme}:// is a URL, but only local files and folders are supported here"
    if storage and scheme not in ("file", "local"):
        rule = f"{scheme}:// is not a writable object storage"
    if scheme == "file":
        return rule, f"write only the path: {path.removeprefix('localhost')}"
    if hub := _HUB.search(text):
        kind = "--repo-type dataset " if hub[1] else ""
        return rule, f"run hf download {kind}{hub[2]} --local-dir ./{hub[3]}, then use ./{hub[3]}"
    return rule, "copy it to a local disk or mount it, and use that path"
