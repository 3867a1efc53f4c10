"""The checks are the same whoever runs them: no account of theirs is seen, nor a cache that torch chose, nor
how many ranks and which compilers a machine has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_BASE_URL",
        "TORCHINDUCTOR_CACHE_DIR",
        "LOCAL_WORLD_SIZE",
        "NGPU",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
