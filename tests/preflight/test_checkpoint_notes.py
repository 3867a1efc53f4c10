"""A start is told of the checkpoint that it goes on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_runs import CPU, configure, save
from toolkit.preflight import check, notes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _told(flags: list[str]) -> list[str]:
    said = notes(configure(["--checkpoint.enable", *flags]), world_size=1, hardware=CPU)
    return [note for note in said if "step-" in note]


def test_what_differs_from_the_run_so_far_is_told(folder: Path) -> None:
    before = configure(["--checkpoint.enable", "--optimizer.lr=0.1", "--metrics.log_freq=7"])
    save(folder, 5, config=before.to_toml(origins=False))
    same = ["--optimizer.lr=0.1"]
    assert _told(same) == []
    changed = ["--optimizer.lr=0.2", "--optimizer.name=Adam", "--training.steps=9", "--loss.z_loss=0.1"]
    [note] = _told(changed)
    assert check(configure(["--checkpoint.enable", *changed]), world_size=1, hardware=CPU) == []
    assert note.startswith("changed since outputs/checkpoint/step-5: training.steps 10000 → 9, ")
    assert "optimizer.name 'AdamW' → 'Adam', optimizer.lr 0.1 → 0.2, loss.z_loss 0.0 → 0.1" in note
    other = ["--job.dump_folder=new", "--checkpoint.initial_load_path=outputs/checkpoint/step-5"]
    assert _told(other) == []  # the weights alone are no run that goes on
    assert len(_told([*other, "--checkpoint.initial_load_model_only=false"])) == 1


def test_a_key_that_the_older_run_did_not_have_is_no_difference(folder: Path) -> None:
    save(folder, 5, config="[optimizer]\nname = 'AdamW'\n")
    assert _told([]) == []


def test_what_becomes_of_the_schedule_is_told(folder: Path) -> None:
    save(folder, 5)
    [note] = _told(["--checkpoint.exclude_from_loading=lr_scheduler,train_state"])
    assert note.startswith("the learning-rate schedule restarts after outputs/checkpoint/step-5")
    [note] = _told(["--checkpoint.exclude_from_loading=train_state"])
    assert note.startswith("the step restarts after outputs/checkpoint/step-5, but the learning-rate")
    assert _told(["--checkpoint.exclude_from_loading=dataloader"]) == []


def test_a_checkpoint_of_another_run_among_its_own_is_told(folder: Path) -> None:
    save(folder, 5, id="a")
    save(folder, 10, id="a")
    assert _told([]) == []
    save(folder, 20, id="b")  # copied here from another run, say
    [note] = _told([])
    assert note == "outputs/checkpoint/step-20 and step-5, step-10 next to it are from different runs"


def test_a_classifier_of_other_classes_is_told_to_be_without_its_head(folder: Path) -> None:
    save(folder, 5, model={"classifier": {"labels": ["a", "b", "c"], "hidden_sizes": []}})
    (folder / "a.jsonl").write_text('{"text": "hello", "label": 1}\n')
    flags = [
        "--checkpoint.enable", "--checkpoint.initial_load_path=outputs/checkpoint/step-5",
        "--job.dump_folder=new", "--finetune.classification.num_labels=3",
        "--training.dataset_path=a.jsonl",
    ]  # fmt: skip
    [note] = _told(flags)
    assert "the classes are LABEL_0, LABEL_1, LABEL_2, and outputs/checkpoint/step-5 has" in note
    assert check(configure(flags), world_size=1, hardware=CPU) == []
    assert _told([*flags, "--finetune.classification.label_names=a,b,c"]) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--checkpoint.export_dtype=bfloat16", "--checkpoint.export_max_bytes=9"],
            [
                "checkpoint.export_max_bytes has no effect without checkpoint.last_save_in_hf = true or "
                "checkpoint.hf_export_interval above 0",
                "checkpoint.export_dtype has no effect without checkpoint.last_save_in_hf = true or "
                "checkpoint.hf_export_interval above 0 or checkpoint.last_save_model_only = true",
            ],
        ),
        (["--checkpoint.export_dtype=bfloat16", "--checkpoint.last_save_model_only"], []),
        (["--checkpoint.export_max_bytes=9", "--checkpoint.hf_export_interval=500"], []),
        (
            ["--checkpoint.initial_load_model_only=false"],
            ["checkpoint.initial_load_model_only has no effect without checkpoint.initial_load_path"],
        ),
        (
            ["--checkpoint.load_only", "--checkpoint.async_mode=async", "--checkpoint.interval=9"],
            [
                "checkpoint.interval, checkpoint.async_mode have no effect without "
                "checkpoint.load_only = false"
            ],
        ),
    ],
)
def test_what_nothing_reads_is_told(flags: list[str], said: list[str], folder: Path) -> None:
    config = configure(["--checkpoint.enable", *flags])
    assert notes(config, world_size=1, hardware=CPU) == said
    assert check(config, world_size=1, hardware=CPU) == []
