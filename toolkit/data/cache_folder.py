"""The folder of this machine for what is kept of corpora and tokenizers. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.config.local_paths import expand_user
from toolkit.config.training import Data


def local_cache(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return ``folder``, of data.cache_folder, or that key's default where it is none of this machine: token
    caches may be in object storage, and all else that is kept has a place here."""
    here = folder is not None and "://" not in str(folder)
    return expand_user(folder if here and folder else Data().cache_folder).absolute()
