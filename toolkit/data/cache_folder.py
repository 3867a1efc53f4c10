"""Local cache folder of corpora and tokenizers. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.config.local_paths import expand_user
from toolkit.config.training import Data


def local_cache(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return ``folder`` (data.cache_folder), or the key's default if ``folder`` is a URL.

    Only token caches may be in object storage; everything else is cached on this machine.
    """
    is_local = folder is not None and "://" not in str(folder)
    return expand_user(folder if is_local and folder else Data().cache_folder).absolute()
