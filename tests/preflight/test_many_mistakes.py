"""Configs with two to five mistakes each: one pass reports all, and each blames a key that the user set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.preflight.bad_runs import CP, CPU, H100, TP
from toolkit import launch, train
from toolkit.cli import run_command
from toolkit.config import Config, InvalidSettings, load_config
from toolkit.config.schema import find_field
from toolkit.config.values import format_toml, parse
from toolkit.errors import ConfigError, Problem
from toolkit.hardware import Hardware
from toolkit.preflight import __main__ as preflight
from toolkit.preflight import check, load, raise_problems


@dataclass(frozen=True)
class Mistaken:
    """A config file, and the keys that are blamed: those of ``settings`` marked with "!"."""

    settings: str
    ranks: int = 1
    hardware: Hardware = CPU

    @property
    def lines(self) -> list[tuple[str, str]]:
        return [(key, value) for key, _, value in (word.partition("=") for word in self.settings.split())]

    @property
    def blamed(self) -> list[str]:
        return sorted(key.removesuffix("!") for key, _ in self.lines if key.endswith("!"))

    def write(self, file: Path) -> None:
        lines = []
        for marked, text in self.lines:
            key = marked.removesuffix("!")
            field = find_field(key)
            value = parse(text, field.annotation) if field else text
            lines.append(f"{key} = {format_toml(value)}")
        file.write_text("\n".join(lines) + "\n")


CONFIGS = [
    # A degree that fits neither the ranks nor the heads, and the default of another key is not to blame.
    Mistaken("parallelism.tensor_parallel_degree!=3 training.steps!=many", ranks=8),
    Mistaken("model.n_heads!=5 optimizer.lr!=fast training.local_batch_size!=0"),
    Mistaken(
        "model.n_heads!=6 model.n_kv_heads=3 optimizer.name!=adamw parallelism.tensor_paralel_degree!=2"
    ),
    # A misspelled key: what it was meant to set is not checked.
    Mistaken(
        "parallelism.tensor_paralel_degree!=2 parallelism.data_parallel_shard_degree=4 training.seqlen!=256 "
        "model.max_seq_len=128 checkpoint.load_step!=7",
        ranks=8,
    ),
    Mistaken(
        "parallelism.context_parallel_degree!=3 parallelism.pipeline_parallel_schedule!=1f1b "
        "model.flavor!=debugmodl",
        ranks=3,
    ),
    Mistaken(
        "parallelism.pipeline_parallel_degree!=4 parallelism.pipeline_parallel_microbatch_size=4 "
        "lr_scheduler.decay_type!=cosin training.dataset_path!=missing.jsonl",
        ranks=4,
    ),
    Mistaken(
        "parallelism.pipeline_parallel_schedule=ZBVZeroBubble parallelism.pipeline_parallel_degree=2 "
        "activation_checkpoint.mode=selective activation_checkpoint.selective_ac_option!=op "
        "parallelism.fsdp_reshard_after_forward!=always compile.mode!=fastest",
        ranks=2,
    ),
    Mistaken(
        "training.global_batch_size!=30 model.hf_assets_path!=no/tokenizer metrics.log_freq!=0", ranks=4
    ),
    Mistaken(
        "optimizer.early_step_in_backward!=true optimizer.implementation!=fussed training.epochs!=-1 "
        "health.nan_policy!=skip"
    ),
    Mistaken(
        "lr_scheduler.total_steps!=100 training.steps=1000 lr_scheduler.warmup_steps!=-5 "
        "lr_scheduler.decay_ratio!=2.0"
    ),
    Mistaken(
        "finetune.adapter=lora finetune.lora.target_modules!=wx finetune.lora.rank!=0 "
        "finetune.lora.dropout=0.1 activation_checkpoint.preserve_rng_state!=false"
    ),
    Mistaken(
        "finetune.objective!=dpo finetune.adapter=lora finetune.lora.alpha!=big data.train_on!=all "
        "model.attention!=flash"
    ),
    Mistaken(
        "activation_checkpoint.mode!=memory_budget activation_checkpoint.memory_budget!=1.5 "
        "compile.components!=modle validation.dataset_path!=none.txt validation.enable=true"
    ),
    Mistaken(
        "training.dtype!=float16 training.mixed_precision_param!=fp8 model.attention!=flex "
        "parallelism.sharding_strategy!=HYBRID_SHARD"
    ),
    Mistaken(
        "checkpoint.enable=true checkpoint.keep_every_n!=700 checkpoint.keep_best!=true "
        "checkpoint.interval=200 checkpoint.export_dtype!=half job.dump_folder!=/dev/null"
    ),
    Mistaken(
        "checkpoint.initial_load_path!=somewhere checkpoint.async_mode!=yes "
        "checkpoint.exclude_from_loading!=optim"
    ),
    # A key of models with experts, keys of torchtitan that are not supported, and old names.
    Mistaken(
        "parallelism.expert_parallel_degree!=8 training.compile!=true fault_tolerance.enable!=true "
        "model.converters!=mx training.batch_size!=4"
    ),
    Mistaken("training.device!=gpu model.n_heads!=5 parallelism.tensor_parallel_degree!=8", ranks=12),
    Mistaken(
        "model.head_dim!=12 parallelism.tensor_parallel_degree!=3 loss.z_loss!=-1",
        ranks=8,
        hardware=H100,
    ),
    Mistaken(
        "data.mixture.code.weight!=-1 data.mixture.code.dataset=embedded data.packing!=2 "
        "data.format!=message parallelism.fsdp_wrap_policy=size parallelism.fsdp_min_num_params!=100 "
        "compile.enable=true"
    ),
]


def _problems(config: Mistaken, file: Path) -> list[Problem]:
    def check(valid: Config) -> None:
        raise_problems(valid, world_size=config.ranks, hardware=config.hardware)

    config.write(file)
    with pytest.raises(ConfigError) as caught:
        check(load([str(file)], check))
    return caught.value.problems


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.blamed[0])
def test_one_pass_reports_every_mistake(
    config: Mistaken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = _problems(config, tmp_path / "run.toml")
    assert sorted({problem.key for problem in problems}) == config.blamed
    assert all(problem.origin.startswith(f"{tmp_path}/run.toml:") for problem in problems)
    assert len({(problem.key, problem.rule) for problem in problems}) == len(problems)


def test_there_are_twenty() -> None:
    assert len(CONFIGS) == 20 and all(2 <= len(config.blamed) <= 5 for config in CONFIGS)


def test_a_flag_is_blamed_before_a_file_and_a_file_before_a_default(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("model.n_kv_heads = 2\nmodel.max_seq_len = 1024\n")
    config = load_config([str(tmp_path / "run.toml"), "--model.n_heads=5"])
    problems = check(config, world_size=1, hardware=CPU)
    assert [problem.key for problem in problems] == ["model.n_heads"] * 2
    config = load_config([str(tmp_path / "run.toml")])
    [problem] = check(config, world_size=1, hardware=CPU)
    assert problem.key == "model.max_seq_len"
    assert problem.rule.startswith("training.seq_len = 2048: ")


def test_fixes_keep_what_the_user_set() -> None:
    config = load_config([f"--{TP}=3", f"--{CP}=2", "--training.seq_len=1024"])
    problems = check(config, world_size=8, hardware=CPU)
    [mesh] = [problem for problem in problems if "world size" in problem.rule]
    assert mesh.key == TP and mesh.fix.endswith(
        "use one of: cp 2 × tp 4; dp_shard 2 × cp 2 × tp 2; dp_shard 4 × cp 2"
    )
    [length] = check(load_config([f"--{CP}=3"]), world_size=3, hardware=CPU)
    assert (length.key, length.fix) == (CP, f"set {CP} to 1")


PROGRAMS = {
    "launch": launch.main,
    "train": train.main,
    "preflight": preflight.main,
    "prepare-data": partial(run_command, "prepare-data"),
}


@pytest.mark.parametrize("main", PROGRAMS.values(), ids=PROGRAMS)
def test_each_program_reports_both_kinds(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--training.steps=many", "--training.dataset_path=missing.txt", f"--job.dump_folder={tmp_path}"]
    assert main(flags) == 2
    said = capsys.readouterr().err
    assert said.count("training.steps = 'many'") == said.count("training.dataset_path = 'missing.txt'") == 1


def test_a_dry_run_checks_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--comm.mode=fake_backend", "--training.steps=many", "--model.n_heads=5"]
    assert train.main([*flags, "--training.dataset_path=missing.txt"]) == 2
    said = capsys.readouterr().err
    assert "training.steps = 'many'" in said and "model.n_heads = 5" in said and "missing.txt" not in said


def test_an_unreadable_file_is_reported_alone(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("model.n_heads = \n")
    with pytest.raises(InvalidSettings) as caught:
        load_config([str(tmp_path / "run.toml"), "--model.dim=7"])
    assert caught.value.rest is None
