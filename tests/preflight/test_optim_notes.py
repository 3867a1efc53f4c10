"""Lengths and warm-ups that are set twice, and what is said of a schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_runs import CPU, REPLICATE, configure
from toolkit.config import Config
from toolkit.preflight import check, notes

EPOCHS = "--training.epochs=2"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _with_files(base: str, child: str, *flags: str) -> Config:
    Path("base.toml").write_text(f"[training]\n{base}\n")
    Path("run.toml").write_text(f'extends = "base.toml"\n[training]\n{child}\n')
    return configure(["--job.config_file=run.toml", *flags])


def _problems(config: Config) -> list[str]:
    return [problem.key for problem in check(config, world_size=1, hardware=CPU)]


def test_epochs_that_are_set_nearer_replace_steps() -> None:
    assert _problems(_with_files("steps = 600", "", EPOCHS)) == []
    assert _problems(_with_files("", "steps = 600", EPOCHS)) == []
    config = _with_files("steps = 600", "epochs = 2", "--training.dataset=embedded")
    assert _problems(config) == []
    assert notes(config, world_size=1, hardware=CPU) == [
        "training.epochs 2 replaces training.steps 600 (base.toml:2)"
    ]


def test_steps_that_are_set_as_near_contradict_epochs() -> None:
    assert _problems(_with_files("", "steps = 600\nepochs = 2")) == ["training.epochs"]


@pytest.mark.parametrize(
    ("base", "child", "flags", "steps"),
    [
        ("epochs = 2", "steps = 600", [], "600"),
        ("epochs = 2", "", ["--training.steps=600"], "600"),
        ("epochs = 2", "", ["--training.steps=10000"], "10000"),  # the default
        ("epochs = 2", "", ["--training.steps=600", "--training.epochs=None"], ""),
    ],
)
def test_steps_that_are_set_nearer_replace_epochs(
    base: str, child: str, flags: list[str], steps: str
) -> None:
    config = _with_files(base, child, "--training.dataset=embedded", *flags)
    assert _problems(config) == []
    assert (config.training.epochs, config.training.steps) == (None, int(steps or 600))
    said = [f"training.steps {steps} replaces training.epochs (base.toml:2)"] if steps else []
    assert notes(config, world_size=1, hardware=CPU) == said


def test_of_three_files_the_nearer_counts() -> None:
    Path("grand.toml").write_text("[training]\nsteps = 600\n[lr_scheduler]\nwarmup_ratio = 0.1\n")
    Path("base.toml").write_text(
        'extends = "grand.toml"\n[training]\nepochs = 2\n[lr_scheduler]\nwarmup_steps = 200\n'
    )
    Path("run.toml").write_text('extends = "base.toml"\n[optimizer]\nlr = 1e-4\n')
    config = configure(["--job.config_file=run.toml", "--training.dataset=embedded"])
    assert _problems(config) == []
    assert notes(config, world_size=1, hardware=CPU) == [
        "training.epochs 2 replaces training.steps 600 (grand.toml:2)",
        "lr_scheduler.warmup_steps 200 replaces lr_scheduler.warmup_ratio (grand.toml:4)",
    ]


@pytest.mark.parametrize(
    "flags",
    [
        [EPOCHS],
        ["--job.config_file=base.toml", EPOCHS],
        ["--job.config_file=base.toml", "--lr_scheduler.warmup_ratio=0.03"],
        ["--lr_scheduler.warmup_ratio=0.03", "--lr_scheduler.decay_type=step", "--lr_scheduler.step_size=9"],
        ["--optimizer.no_decay=*norm.weight,tok_embeddings.weight", "--optimizer.name=Adam"],
        ["--optimizer.no_decay=*lora_a", "--finetune.adapter=lora"],
    ],
)
def test_a_saved_config_can_be_run_again(flags: list[str]) -> None:
    """It names every key, defaults too, and shows what was replaced without setting it again."""
    Path("base.toml").write_text("[training]\nsteps = 600\n[lr_scheduler]\nwarmup_steps = 20\n")
    config = configure(flags)
    assert _problems(config) == []
    Path("saved.toml").write_text(config.to_toml())
    assert _problems(configure(["--job.config_file=saved.toml"])) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        # 200 steps of warm-up may be more than an epoch, but who knows before the corpus is open?
        ([EPOCHS], []),
        (["--training.steps=100", "--lr_scheduler.warmup_ratio=0.1"], []),
        (
            [
                "--training.steps=100",
                "--lr_scheduler.warmup_ratio=0.3",
                "--lr_scheduler.decay_ratio=0.8",
            ],
            ["lr_scheduler.decay_ratio 0.8 is 80 steps, shortened to the 70 after warmup"],
        ),
        (
            ["--optimizer.no_decay=*norm.weight", "--optimizer.weight_decay=0"],
            ["optimizer.no_decay has no effect without optimizer.weight_decay above 0"],
        ),
    ],
)
def test_note(flags: list[str], said: list[str]) -> None:
    assert notes(configure(flags), world_size=1, hardware=CPU) == said


def test_a_step_in_backward_over_replicas_is_said_to_save_nothing() -> None:
    flags = ["--optimizer.early_step_in_backward", "--training.max_norm=inf", f"--{REPLICATE}=2"]
    config = configure(flags)
    assert check(config, world_size=2, hardware=CPU) == []
    assert "saves no memory with 2 replicas" in notes(config, world_size=2, hardware=CPU)[-1]
