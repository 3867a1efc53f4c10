"""The preflight sees if a run can be sent to a tracker, with and without its package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_runs import CPU, configure
from toolkit.preflight.planned_run import PlannedRun
from toolkit.preflight.rules import metrics


def problems(monkeypatch: pytest.MonkeyPatch, *, installed: bool) -> str:
    monkeypatch.setattr(metrics, "find_spec", lambda name: object() if installed else None)
    run = PlannedRun(configure(["--metrics.enable_wandb"]), 1, CPU)
    return "\n".join(map(str, metrics.wandb_ready(run)))


def test_the_package_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install -c constraints.txt -e '.[wandb]'" in problems(monkeypatch, installed=False)


def test_without_a_key_wandb_would_ask_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = problems(monkeypatch, installed=True)
    assert "no API key for api.wandb.ai" in said
    assert "wandb login" in said and "WANDB_MODE=offline" in said
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert problems(monkeypatch, installed=True) == ""
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert "wandb.example.com" in problems(monkeypatch, installed=True)


@pytest.mark.parametrize(("name", "value"), [("WANDB_API_KEY", "0"), ("WANDB_MODE", "offline")])
def test_a_key_or_no_sending_at_all_will_do(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert problems(monkeypatch, installed=True) == ""


def test_trackers_need_their_packages_and_comet_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = PlannedRun(configure(["--metrics.report_to=comet,mlflow,trackio"]), 1, CPU)
    monkeypatch.setattr(metrics, "find_spec", lambda name: None if name == "mlflow" else object())
    [missing] = metrics.trackers_ready(run)
    assert "mlflow is not installed" in missing.rule and "[mlflow]" in missing.fix
    monkeypatch.setattr(metrics, "find_spec", lambda name: object())
    monkeypatch.setenv("HOME", str(tmp_path))
    [key] = metrics.trackers_ready(run)
    assert "COMET_API_KEY" in key.rule and "COMET_START_ONLINE=0" in key.fix
    (tmp_path / ".comet.config").write_text("[comet]\napi_key=0\n")
    assert metrics.trackers_ready(run) == []
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    assert metrics.trackers_ready(run) == []
