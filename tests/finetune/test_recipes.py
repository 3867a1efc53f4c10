"""The recipes in train_configs/fine_tune: each passes the preflight on the GPUs of its launch line, and takes
the memory that its head says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from tests.preflight.bad_runs import H100
from toolkit.config import Config, load_config
from toolkit.planner.fit import forecast
from toolkit.planner.memory import rank_state
from toolkit.preflight import check
from toolkit.preflight.planned_run import PlannedRun

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "train_configs/fine_tune"
MODELS = {
    "gpt_oss_20b_lora": ("gpt_oss", "20B"),
    "gpt_oss_20b_qlora": ("gpt_oss", "20B"),
    "llama2_70b_full": ("llama2", "70B"),
    "llama2_7b_lora": ("llama2", "7B"),
    "llama3_1b_lora": ("llama3.2", "1B"),
    "llama3_3b_full": ("llama3.2", "3B"),
    "llama3_70b_lora": ("llama3.3", "70B"),
    "llama3_8b_full": ("llama3.1", "8B"),
    "llama3_8b_lora": ("llama3.1", "8B"),
    "llama3_8b_qlora": ("llama3.1", "8B"),
    "mistral_7b_lora": ("mistral0.3", "7B"),
    "qwen2.5_7b_lora": ("qwen2.5", "7B"),
    "qwen3_30b_a3b_lora": ("qwen3_moe", "30B-A3B"),
    "qwen3_30b_a3b_qlora": ("qwen3_moe", "30B-A3B"),
    "qwen3_8b_lora": ("qwen3", "8B"),
}


def configure(name: str, folder: Path) -> Config:
    """The recipe, its model by name in place of a folder of weights, and some data."""
    model, flavor = MODELS[name]
    (folder / "text.jsonl").write_text(json.dumps({"content": "text"}) + "\n")
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    path = FOLDER / f"{name}.toml"
    plain = load_config(["--job.config_file", str(path)])
    data = folder / ("chat.jsonl" if plain.data.format == "messages" else "text.jsonl")
    flags = [f"--training.dataset_path={data}", f"--model.name={model}", f"--model.flavor={flavor}"]
    if plain.validation.enable:
        flags.append(f"--validation.dataset_path={data}")
    return load_config(
        [
            f"--job.config_file={path}",
            "--checkpoint.no-initial_load_in_hf",
            f"--model.hf_assets_path={ROOT / 'tests/assets/tokenizer'}",
            f"--job.dump_folder={folder}",
            f"--data.cache_folder={folder}",
            *flags,
        ]
    )


def test_every_recipe_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.toml")} == {*MODELS, "chat"}


def _world(head: str) -> int:
    """The ranks of a recipe's launch line."""
    numbers = re.search(r"NGPU=(\d+)|--nnodes=(\d+) --nproc_per_node=(\d+)", head)
    assert numbers
    return math.prod(int(number) for number in numbers.groups() if number)


@pytest.mark.parametrize("name", MODELS)
def test_it_runs_on_the_gpus_of_its_launch_line_in_the_memory_that_it_says(name: str, tmp_path: Path) -> None:
    head = (FOLDER / f"{name}.toml").read_text().partition("\n\n")[0]
    assert f"train_configs/fine_tune/{name}.toml" in head
    world = _world(head)
    config = configure(name, tmp_path)
    said = [str(problem) for problem in check(config, world_size=world, hardware=H100)]
    assert said == []
    run = PlannedRun(config, world, H100)
    assert run.mesh and run.model
    rank = rank_state(config, run.model, run.mesh, 0, param_dtype=torch.bfloat16, target="cuda")
    takes = rank.parameter_bytes + rank.gradient_bytes + rank.optimizer_bytes
    stated = re.search(r"take ([\d.]+) GiB a GPU", head)
    assert stated and float(stated[1]) == round(takes / 2**30, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_a_step_takes_what_it_says_and_fits(name: str, tmp_path: Path) -> None:
    head = (FOLDER / f"{name}.toml").read_text().partition("\n\n")[0]
    run = PlannedRun(configure(name, tmp_path), _world(head), H100)
    stated, sizes = re.search(r"a step ([\d.]+) at most", head), re.findall(r"of (\d+) GB", head)
    assert stated and sizes
    peak = forecast(run).peak
    assert float(stated[1]) == round(peak / 2**30, 1)
    assert peak <= 0.97 * float(sizes[-1]) * 1e9  # CUDA's context takes half a GiB


def test_the_settings_of_the_70b_run_are_those_of_its_source() -> None:
    config = load_config([f"--job.config_file={FOLDER / 'llama2_70b_full.toml'}"])
    training, schedule, optimizer = config.training, config.lr_scheduler, config.optimizer
    assert (training.seq_len, training.local_batch_size, training.steps) == (2048, 1, 500)
    assert training.global_batch_size == 16 and config.data.packing and config.data.text_column == "content"
    assert (optimizer.lr, optimizer.weight_decay) == (5e-5, 0.01)
    assert (schedule.decay_type, schedule.warmup_ratio) == ("cosine", 0.03)
    frequencies = config.metrics.log_freq, config.validation.freq, config.checkpoint.interval
    assert frequencies == (25, 100, 250)
    assert training.mixed_precision_param == "bfloat16"


def test_llama_recipes_defaults() -> None:
    config = load_config([f"--job.config_file={FOLDER / 'llama2_7b_lora.toml'}"])
    lora = config.finetune.lora
    assert (lora.rank, lora.alpha, lora.dropout, lora.target_modules) == (8, 32.0, 0.05, ["wq", "wv"])
    assert (config.optimizer.lr, config.training.local_batch_size, config.training.epochs) == (1e-4, 4, 3)
    schedule = config.lr_scheduler
    assert (schedule.decay_type, schedule.gamma, schedule.step_size) == ("step", 0.85, None)
    assert config.training.max_norm == 1.0
