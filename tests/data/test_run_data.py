"""The launcher hands the ranks what it has opened, in the text of an environment variable."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.training import small_config
from toolkit.data.build import open_data
from toolkit.data.run_data import RunData, from_text
from toolkit.data.token_files import MixturePart
from toolkit.errors import DataError


def handed_on(tmp_path: Path) -> tuple[RunData, RunData]:
    for name in ("prose", "code"):
        (tmp_path / f"{name}.txt").write_text(f"some {name} " * 100)
    mixture = {
        name: {"weight": weight, "dataset_path": str(tmp_path / f"{name}.txt")}
        for name, weight in (("prose", 3.0), ("code", 1.0))
    }
    config = small_config(tmp_path / "run", data={"mixture": mixture}, validation={"enable": True})
    data = open_data(config, progress=False)
    parts = data.train(config)
    assert isinstance(parts, tuple) and all(isinstance(part, MixturePart) for part in parts)
    assert [(part.name, part.weight) for part in parts] == [("code", 1.0), ("prose", 3.0)]
    return data, from_text(data.text())


def test_ranks_open_what_the_launcher_has(tmp_path: Path) -> None:
    data, ours = handed_on(tmp_path)
    assert (ours.n_words, ours.pad_id) == (data.n_words, data.pad_id)
    assert list(ours.caches) == ["data.mixture.code", "data.mixture.prose", "validation"]
    for table, cache in ours.caches.items():
        assert cache.fingerprint == data.caches[table].fingerprint
        assert np.array_equal(cache.tokens, data.caches[table].tokens)


def test_what_is_gone_since_is_told(tmp_path: Path) -> None:
    data, _ = handed_on(tmp_path)
    shutil.rmtree(data.caches["validation"].folder)
    with pytest.raises(DataError, match="that the launcher has prepared.*\n  fix:  start again"):
        from_text(data.text())
