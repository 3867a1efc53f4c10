"""URLs in the place of paths: refused by name, since nothing here reads or writes object storage.

Taken as a path, ``s3://bucket/run`` would become a folder ``s3:``. Imports no torch.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

_URL = re.compile(r"(?:^|,)\s*([A-Za-z][A-Za-z0-9+.-]*)://([^,\s]*)")  # of several paths with commas, too
_HUB = re.compile(r"(?:https?://(?:www\.)?huggingface\.co/|hf://)(datasets/)?([\w.-]+/([\w.-]+))")


def url_problem(text: str) -> tuple[str, str] | None:
    """Say why ``text`` names nothing on this machine, and what to do; None where it is no URL."""
    found = _URL.search(text)
    if found is None:
        return None
    scheme, place = found.groups()
    rule = f"{scheme}:// is a URL, and only files and folders of this machine are read and written"
    if scheme == "file":
        return rule, f"write the path alone: {place.removeprefix('localhost')}"
    if hub := _HUB.search(text):
        kind = "--repo-type dataset " if hub[1] else ""
        return rule, f"hf download {kind}{hub[2]} --local-dir ./{hub[3]} fetches it; then name ./{hub[3]}"
    return rule, "copy it to a local disk or mount it, and name that path"


def path_text(text: str) -> str:
    """The type of an argument that is a path, or several."""
    if found := url_problem(text):
        rule, fix = found
        raise argparse.ArgumentTypeError(f"{text!r}: {rule}\n  fix:  {fix}")
    return text


def path(text: str) -> Path:
    """The type of an argument that is one path."""
    return Path(path_text(text))
