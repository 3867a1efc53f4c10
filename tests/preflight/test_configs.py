"""The configs that ship, and torchtitan's own, at world sizes that they are made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_runs import H100
from tests.preflight.bad_weights import SHAPE, write_model
from toolkit.config import Config, load_config
from toolkit.config.unsupported import REMOVED, UNSUPPORTED
from toolkit.models.parameters import parameter_count
from toolkit.preflight import check
from toolkit.preflight.planned_run import PlannedRun

ROOT = Path(__file__).parents[2]
TITAN = ROOT / "tests" / "config" / "torchtitan"

# Assets that a user fetches.
LOCAL = ["--model.hf_assets_path=tests/assets/tokenizer", "--training.dataset_path=toolkit/data/embedded"]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)


def load(path: Path, tmp_path: Path, *flags: str) -> Config:
    outputs = [f"--job.dump_folder={tmp_path}", f"--data.cache_folder={tmp_path}"]
    return load_config(["--job.config_file", str(path), *outputs, *flags])


@pytest.mark.parametrize(
    ("name", "world_sizes", "parameters"),
    [
        ("debug_model", (1, 2, 4, 8), 5_245_184),
        ("debug_moe", (1, 2, 4, 8), 9_185_536),
        ("chat_debug", (1, 2, 4, 8), 5_245_184),
        ("reproduce/books_15m", (1, 2, 4, 8), 15_735_168),
        ("llama3_1b", (1, 8, 64), 1_235_814_400),
        ("llama3_3b", (1, 8, 64), 3_212_749_824),
        ("llama3_8b", (8, 64), 8_030_261_248),
        ("llama3_8b_one_gpu", (1,), 8_030_261_248),
        ("llama3_8b_one_h200", (1,), 8_030_261_248),
        ("llama3_8b_lora_one_gpu", (1,), 8_030_261_248),
        ("llama3_70b", (64, 256), 70_553_706_496),
        ("llama3_405b", (512,), 405_853_388_800),
        ("llama2_7b", (8, 64), 6_738_415_616),
        ("llama2_70b", (64,), 68_976_648_192),
    ],
)
def test_our_config(name: str, world_sizes: tuple[int, ...], parameters: int, tmp_path: Path) -> None:
    own = [] if "debug" in name or "reproduce" in name else LOCAL
    own = [*own, "--checkpoint.initial_load_in_hf=false"] if "lora" in name else own
    config = load(ROOT / "train_configs" / f"{name}.toml", tmp_path, *own)
    assert config.training.global_batch_size != -1, "a run that is the same on any mesh"
    for world_size in world_sizes:
        assert check(config, world_size=world_size, hardware=H100) == []
        model = PlannedRun(config, world_size, H100).model
        assert model is not None and parameter_count(model) == parameters


def test_fine_tuning_takes_the_model_from_the_folder_of_its_weights(tmp_path: Path) -> None:
    flags = [f"--model.hf_assets_path={write_model(tmp_path)}", LOCAL[1]]
    flags += ["--model.tokenizer_path=tests/assets/tokenizer", "--model.attention=sdpa"]  # heads of 8
    config = load(ROOT / "train_configs" / "fine_tune.toml", tmp_path, *flags)
    for world_size in (1, 2, 8, 16):
        assert check(config, world_size=world_size, hardware=H100) == []
        assert PlannedRun(config, world_size, H100).model == SHAPE


def test_all_our_configs_are_tested() -> None:
    tested = {case[0] for case in test_our_config.pytestmark[0].args[1]}  # type: ignore[attr-defined]
    tested |= {"fine_tune"}
    folder = ROOT / "train_configs"
    paths = [*folder.glob("*.toml"), *folder.glob("reproduce/*.toml")]
    assert tested == {path.relative_to(folder).with_suffix("").as_posix() for path in paths}


@pytest.mark.parametrize(
    ("name", "world_sizes"),
    [
        ("debug_model", (1, 2, 8)),
        ("llama3_8b", (1, 8, 64)),
        ("llama3_70b", (8, 64, 256)),
        ("llama3_405b", (8, 128, 512, 16384)),
    ],
)
def test_torchtitan_config(name: str, world_sizes: tuple[int, ...], tmp_path: Path) -> None:
    config = load(TITAN / f"{name}.toml", tmp_path, "--model.hf_assets_path=tests/assets/tokenizer")
    for world_size in world_sizes:
        assert check(config, world_size=world_size, hardware=H100) == []


def test_torchtitan_70b_does_not_fit_12_ranks(tmp_path: Path) -> None:
    config = load(TITAN / "llama3_70b.toml", tmp_path, "--model.hf_assets_path=tests/assets/tokenizer")
    said = "\n".join(map(str, check(config, world_size=12, hardware=H100)))
    assert "cp 1 × tp 8 = 8 does not divide the world size 12" in said and "dp_shard 3 × tp 4" in said


def test_every_option_of_torchtitan_at_its_default(tmp_path: Path) -> None:
    theirs = load_config(["--job.config_file", str(TITAN / "defaults.toml")])
    ours = Config()
    keys = {field.key for field in ours.present_fields()}
    differing = {key for key in keys if theirs.value(key) != ours.value(key)}
    assert differing == {
        "job.config_file",
        "metrics.enable_tensorboard",
        "checkpoint.last_save_model_only",
        "model.name",
        "model.flavor",
        "model.hf_assets_path",
        "training.mixed_precision_param",
    }
    only_ours = {key for key in keys if theirs.origin(key) == "default"}
    theirs_refused = UNSUPPORTED.keys() - REMOVED.keys()
    rows = len(keys) - len(only_ours) + len(theirs_refused)
    assert rows == 149, "rows of torchtitan 0.2.2's JobConfig"
    assert {key.split(".")[0] for key in only_ours} == {
        "job",
        "metrics",
        "model",
        "checkpoint",
        "optimizer",
        "lr_scheduler",
        "training",
        "activation_checkpoint",
        "data",
        "health",
        "finetune",
        "loss",
        "distillation",
        "moe",
        "parallelism",
        "comm",
        "debug",
        "compile",
        "validation",
        "evaluation",
    }
