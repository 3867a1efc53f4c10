"""URLs in the place of paths: which are taken where object storage is, and what to do with the others.

Imports neither torch nor fsspec; loaded where a value has ``://`` in it.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from toolkit.errors import redact

Storage: TypeAlias = bool | Literal["read"]
"""True where object storage is read and written, "read" where anything that has a URL is read."""
_URL = re.compile(r"(?:^|,)\s*([A-Za-z][A-Za-z0-9+.-]*)://([^,\s]*)")  # of several paths with commas, too
_HUB = re.compile(r"(?:https?://(?:www\.)?huggingface\.co/|hf://)(datasets/)?([\w.-]+/([\w.-]+))")
_NO_STORE = ("file", "local", "http", "https", "hf", "memory", "ftp")
"""Schemes that no run can save to or that name no store."""
_NO_SCHEME = ":// stands in URLs alone, behind a scheme such as s3", "write a path without ://"
_CREDENTIALS = "name the store by its bucket and path alone; credentials belong in its environment or profile"


def is_url(text: str) -> bool:
    return _URL.match(text) is not None


def url_problem(text: str, *, storage: Storage = False) -> tuple[str, str] | None:
    """Say why a URL cannot stand here, and what to do; None where it can, or where ``text`` is none."""
    found = _URL.search(text)
    if found is None:
        return _NO_SCHEME if "://" in text else None
    scheme, place = found.groups()
    if redact(text) != text:
        return "a URL with credentials would be told in logs and checkpoints", _CREDENTIALS
    if storage == "read" and scheme not in ("file", "local"):
        return None if place else (f"{scheme}:// takes a path", f"write {scheme}://bucket/folder")
    if storage and scheme not in _NO_STORE and is_url(text):
        bucket, *rest = place.split("/")
        strange = {".", ".."} & {bucket, *rest} or any(mark in text for mark in "*?[]#, ")
        if not bucket or strange:
            return f"{scheme}:// takes a bucket and a path", f"write {scheme}://bucket/folder"
        return None
    rule = f"{scheme}:// is a URL, and only files and folders of this machine are read and written"
    if storage and scheme not in ("file", "local"):
        rule = f"{scheme}:// names no object storage that can be written"
    if scheme == "file":
        return rule, f"write the path alone: {place.removeprefix('localhost')}"
    if hub := _HUB.search(text):
        kind = "--repo-type dataset " if hub[1] else ""
        return rule, f"hf download {kind}{hub[2]} --local-dir ./{hub[3]} fetches it; then name ./{hub[3]}"
    return rule, "copy it to a local disk or mount it, and name that path"
