"""Presets by name, as a config and as what another file extends."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.config import load_config, presets
from toolkit.config.schema import Config
from toolkit.errors import ConfigError


def test_a_first_word_is_a_preset_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(["llama3_70b"]).model.flavor == "70B"
    assert load_config(["fine_tune/llama3_8b_lora.toml"]).finetune.adapter == "lora"
    (tmp_path / "llama3_70b").write_text('[model]\nflavor = "8B"\n')  # a file comes before a preset
    assert load_config(["llama3_70b", "--training.steps", "7"]).model.flavor == "8B"


def test_a_file_elsewhere_extends_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('extends = "llama3_70b"\n[training]\nsteps = 7\n')
    config = load_config([str(tmp_path / "mine.toml")])
    assert (config.model.flavor, config.training.steps) == ("70B", 7)
    (tmp_path / "two.toml").write_text('extends = "mine.toml"\n')
    assert load_config([str(tmp_path / "two.toml")]).training.steps == 7


def test_a_name_that_is_almost_a_preset_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no file lama3_8b\n.*did you mean llama3_8b\?"):
        load_config(["lama3_8b"])
    (tmp_path / "mine.toml").write_text('extends = "lama3_8b"\n')
    with pytest.raises(ConfigError, match=r"mine.toml:1: extends = 'lama3_8b'"):
        load_config(["mine.toml"])


@pytest.mark.parametrize("name", presets.names())
def test_presets_load_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_config([name]), Config)
