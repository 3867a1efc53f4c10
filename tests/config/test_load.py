"""Files, overrides and origins as a user meets them, and every mistake that the schema can see."""

from __future__ import annotations

import signal
import subprocess
import sys
import typing
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import pytest

from toolkit.config import Config, load_config
from toolkit.config.schema import Field, fields
from toolkit.config.unsupported import UNSUPPORTED
from toolkit.config.values import format_toml
from toolkit.errors import ConfigError


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def load(folder: Path, text: str, *flags: str) -> Config:
    return load_config(["--job.config_file", write(folder, "run.toml", text), *flags])


def message(folder: Path, text: str, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *flags)
    return str(caught.value)


# Every key of the schema


def wrong_value(annotation: Any) -> object:
    """A value of a TOML type that ``annotation`` does not take."""
    kinds = {NoneType, *_kinds(annotation)}
    if str in kinds:
        return 7
    return "maybe" if Literal not in kinds else "no such choice"


def _kinds(annotation: Any) -> set[Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Literal, list):
        return {origin}
    return {annotation} if not arguments else {kind for inner in arguments for kind in _kinds(inner)}


# A job.config_file inside a file is what a saved config.toml came from; the flag that names the file wins.
IN_FILES = [field for field in fields() if field.key != "job.config_file"]


@pytest.mark.parametrize("field", IN_FILES, ids=lambda field: field.key)
def test_wrong_type_of_every_key(field: Field, tmp_path: Path) -> None:
    value = wrong_value(field.annotation)
    said = message(tmp_path, f"[{field.table}]\n\n{field.name} = {format_toml(value)}\n")
    assert said.startswith(f"{tmp_path}/run.toml:3: {field.key} = {value!r}\n  rule: must be ")
    assert said.count("\n") == 2 and "\n  fix:  " in said


# Any text is a string or a list of strings.
NOT_TEXT = [field for field in fields() if not {str, list} & _kinds(field.annotation)]


@pytest.mark.parametrize("field", NOT_TEXT, ids=lambda field: field.key)
def test_wrong_flag_of_every_key_that_is_not_text(field: Field) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([f"--{field.key}=no_such_value"])
    said = str(caught.value)
    assert said.startswith(f"--{field.key}: {field.key} = 'no_such_value'\n  rule: must be ")
    assert said.count("\n") == 2 and "\n  fix:  " in said


@pytest.mark.parametrize("field", fields(), ids=lambda field: field.key)
def test_unknown_key_beside_every_key(field: Field, tmp_path: Path) -> None:
    said = message(tmp_path, f"[{field.table}]\n{field.name}_ = 1\n")
    assert said == (
        f"{tmp_path}/run.toml:2: {field.key}_ = 1\n"
        f"  rule: [{field.table}] has no key {field.name}_\n"
        f"  fix:  did you mean {field.key}?"
    )
    with pytest.raises(ConfigError, match=f"did you mean {field.key}\\?"):
        load_config([f"--{field.key}_", "1"])


# Mistakes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainin]\nsteps = 3", "run.toml:1: trainin = {'steps': 3}\n  rule: there is no table [trainin]"),
        ("[trainin]\nsteps = 3", "did you mean training?"),
        ("steps = 3", "did you mean training.steps or validation.steps?"),
        ("[checkpoint]\nenable_checkpoint = true", "did you mean checkpoint.enable?"),
        ("[training]\ncompile = true", "did you mean compile.enable?"),
        ("[float8]\nfilter_fqns = []", "did you mean quantize.linear.float8?"),
        ("[training]\nbatch_size = 1", "did you mean training.local_batch_size?"),
        ("[optimizer]\nwarmup_steps = 1", "did you mean lr_scheduler.warmup_steps?"),
        ("training = 3", "training is a table"),
        ("[training.steps]\nx = 3", "run.toml:1: training.steps = {'x': 3}\n  rule: must be an integer"),
        ('[training]\nseq_len = "2048"', "did you mean seq_len = 2048?"),
        ('[optimizer]\nname = "adamw"', 'did you mean name = "AdamW"?'),
        ("[training]\nsteps = 0", "must be an integer of at least 1"),
        ("[lr_scheduler]\ndecay_ratio = 1.5", "must be a number from 0 to 1"),
        ("[optimizer]\nbeta2 = 1", "must be a number of at least 0 and below 1"),
        ("[parallelism]\ndata_parallel_shard_degree = 0", "must be -1 or an integer from 1 to 1000000"),
        ("[optimizer]\neps = 0.0", "must be a number of at least 1e-37"),
        ("[optimizer]\nlr = nan", "must be a number of at least 0\n  fix:  for example lr = "),
        ("[parallelism]\nsharding_strategy = true", "sharding_strategy = True\n  rule: must be one of"),
        ("[parallelism]\nsharding_strategy = 3.0", "sharding_strategy = 3.0\n  rule: must be one of"),
        ("[checkpoint]\nload_step = -1.0", "must be -1 or an integer"),
        ("[comm]\nsave_timeout_seconds = 9999999999", "must be an integer from 1 to 1000000000"),
        (
            "[parallelism]\npipeline_parallel_last_stage_less_layers = 9999",
            "must be an integer from 0 to 1000",
        ),
        (
            '[training]\ndtype = "float16"',
            'must be one of "bfloat16", "float32", "float64"; float16 would need',
        ),
        ('[training]\ndtype = "float16"', 'did you mean dtype = "bfloat16"?'),
        ("[training]\nsteps = 3\nsteps = 4", "run.toml:3: training.steps is set twice, first in line 2"),
        ("[training]\n[model]\n[training]", "run.toml:3: training is set twice, first in line 1"),
        ("[training]\nsteps = \n", "run.toml:2: not valid TOML: Invalid value: steps ="),
        ("[training]\ndataset = c4\n", "run.toml:2: not valid TOML"),
        ('[training]\ndataset = """c4\n', "run.toml:2: not valid TOML"),
        ("[training\n", "run.toml:1: not valid TOML"),
        ("extends = 3", "must be the name of one TOML file"),
        ("[data]\nmixture = 3", "run.toml:2: data.mixture = 3\n  rule: data.mixture is a table"),
        ("[data.mixture]\ncode = 3", "data.mixture.code is a table\n  fix:  write [data.mixture.code]"),
        ("[data.mixture.code]", "run.toml:1: data.mixture.code = {}\n  rule: [data.mixture.code] is empty"),
        ("[data.mixture.code]\nwight = 3", "did you mean data.mixture.code.weight?"),
        (
            "[data.mixture.code]\nweight = -1",
            "run.toml:2: data.mixture.code.weight = -1\n  rule: must be a num",
        ),
        ("[data.mixtures.code]\nweight = 1", "no table [data.mixtures]\n  fix:  did you mean data.mixture."),
        (
            '[data]\nmixture."a b" = { weight = 1 }',
            "run.toml:2: data.mixture = 'a b'\n  rule: a name in [data.mixture] may only contain letters,",
        ),
        ('[parallelism]\nsharding_strategy = "3"', "did you mean sharding_strategy = 3?"),
        ('[parallelism]\nsharding_strategy = "no_shard"', 'did you mean sharding_strategy = "NO_SHARD"?'),
        (
            "[parallelism]\nfsdp_reshard_after_forward = 1",
            'must be one of "default", "always", "never" or an integer of at least 2',
        ),
        ('[parallelism]\nfsdp_reshard_after_forward = "4"', "mean fsdp_reshard_after_forward = 4?"),
        ('\nextends = "other.toml"', "run.toml:2: extends = 'other.toml'\n  rule: there is no file"),
    ],
)
def test_mistake_in_a_file(text: str, said: str, tmp_path: Path) -> None:
    assert said in message(tmp_path, text)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--debug", "run.toml"], "write --job.config_file run.toml"),
        (["--training.steps"], "--training.steps needs a value"),
        (["--training.steps", "--compile.enable"], "--training.steps needs a value"),
        (["--training.steps", "3", "4"], "'4' belongs to no flag"),
        (["--trainin.steps", "3"], "did you mean training.steps?"),
        (["--steps", "3"], "did you mean training.steps or validation.steps?"),
        (["--training.steps", "3.5"], "for example --training.steps 10000"),
        (["--checkpoint.async_mode", "asynch"], "did you mean --checkpoint.async_mode async?"),
        (["--checkpoint.enable=yes"], "must be true or false"),
        (["--checkpoint.enable", "yes"], "checkpoint.enable = 'yes'\n  rule: must be true or false"),
        (["-training.steps", "3"], "write --training.steps"),
        (["-training.steps=3"], "write --training.steps=3"),
        (["-training.seq-len=3"], "write --training.seq-len=3"),
        (["--checkpoint.no-enable", "true"], "'true' belongs to no flag"),
        (["--checkpoint.no-enable=true"], "[checkpoint] has no key no_enable"),
        (["--training.no-steps"], "[training] has no key no_steps"),
        (["--training.seq-lem", "3"], "did you mean training.seq_len?"),
        (["--training.seq-len", "x"], "for example --training.seq-len 2048"),
        (["--training.dataloader", "2"], "set one of its keys; --help training.dataloader lists them"),
        (["--data.columns.output", "answer"], "write --data.columns output=answer, more pairs after commas"),
        (["--training.columns.output=answer"], "training.columns must be set in one flag"),
        (["--data.mixture", "2"], "--help data.mixture lists them"),
        (["--data.mixture.code", "2"], "--help data.mixture.code lists them"),
        (["--data.mixture.code.weigth=2"], "did you mean data.mixture.code.weight?"),
        (["--data.mixture..weight=2"], "data.mixture = ''\n  rule: a name in [data.mixture]"),
        (["--parallelism.sharding_strategy", "6"], 'HYBRID_SHARD_ZERO2", 1, 2, 3, 4, 5 or "None"'),
        (["--parallelism.fsdp_reshard_after_forward", "1"], "or an integer of at least 2"),
        (["--parallelism.fsdp_reshard_after_forward", "Never"], "did you mean --parallelism.fsdp_reshard"),
        (["--help", "trainings"], "did you mean training?"),
        (["--model.converters", "flaot8"], "did you mean --model.converters float8?"),
        (
            ["--checkpoint.exclude_from_loading", "model,lr_schedule"],
            "did you mean --checkpoint.exclude_from_loading model,lr_scheduler?",
        ),
        (["--compile.components", "model,xyz"], "for example --compile.components model,loss, the default"),
        (["--job.config_file", "no/such.toml"], "there is no file no/such.toml"),
    ],
)
def test_mistake_on_the_command_line(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    assert said in str(caught.value)


def test_all_mistakes_at_once_and_each_once(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[training]\nsteps = 'x'\nunknown = 1\n")
    with pytest.raises(ConfigError) as caught:
        load(
            tmp_path,
            'extends = "base.toml"\n[optimizer]\nlr = "y"\n[metrics]\nlog_frequency = 1\n',
            "--training.seq_len=z",
            "--no.such 1",
        )
    assert sorted(problem.key for problem in caught.value.problems) == [
        "metrics.log_frequency",
        "no.such 1",
        "optimizer.lr",
        "training.seq_len",
        "training.steps",
        "training.unknown",
    ]


# Files


def test_extends_in_a_chain_with_origins(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, "grand.toml", "[training]\nsteps = 1\nseq_len = 1\n[optimizer]\nlr = 1.0\n")
    write(tmp_path, "sub/parent.toml", 'extends = "../grand.toml"\n[training]\nseq_len = 2\n')
    config = load(
        tmp_path,
        'extends = "sub/parent.toml"\n\n[training]\nlocal_batch_size = 3\n',
        "--training.global_batch_size=12",
    )
    training = config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (1, 2, 3)
    assert config.origin("training.steps") == f"{tmp_path}/sub/../grand.toml:2"
    assert config.origin("training.seq_len") == f"{tmp_path}/sub/parent.toml:3"
    assert config.origin("training.local_batch_size") == f"{tmp_path}/run.toml:4"
    assert config.origin("training.global_batch_size") == "--training.global_batch_size"
    assert config.origin("training.dtype") == "default"


def test_a_child_changes_one_weight_and_a_flag_adds_a_part(tmp_path: Path) -> None:
    base = '[data.mixture.code]\nweight = 1\ndataset_path = "code/"\n[data.mixture.web]\nweight = 3\n'
    write(tmp_path, "base.toml", base)
    text = 'extends = "base.toml"\n[data]\nmixture.code.weight = 2\n'
    config = load(tmp_path, text, "--data.mixture.books.weight", "0.5")
    weights = {name: corpus.weight for name, corpus in config.data.mixture.items()}
    assert weights == {"code": 2.0, "web": 3.0, "books": 0.5}
    assert config.value("data.mixture.code.dataset_path") == "code/"
    assert config.origin("data.mixture.code.weight") == f"{tmp_path}/run.toml:3"
    assert config.origin("data.mixture.code.dataset_path") == f"{tmp_path}/base.toml:3"
    assert config.origin("data.mixture.books.weight") == "--data.mixture.books.weight"
    assert config.origin("data.mixture.books.dataset") == "default"


def test_files_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path, "other.toml", 'extends = "run.toml"\n')
    said = message(tmp_path, 'extends = "other.toml"\n')
    assert "in a cycle" in said and f"{tmp_path}/other.toml:1: extends" in said


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'[job]\ndescription = "\xe9"\n')
    for path, said in [("latin.toml", "is not UTF-8 text"), ("", "cannot be read"), ("lation.toml", "latin")]:
        with pytest.raises(ConfigError, match=said):
            load_config(["--job.config_file", f"{tmp_path}/{path}"])


# Overrides


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--training.steps", "5"], "training.steps", 5),
        (["--training.steps=5"], "training.steps", 5),
        (["--training.steps", "5", "--training.steps", "6"], "training.steps", 6),
        (["--training.global_batch_size", "-1"], "training.global_batch_size", -1),
        (["--checkpoint.enable"], "checkpoint.enable", True),
        (["--checkpoint.enable", "--training.steps", "3"], "checkpoint.enable", True),
        (["--metrics.enable_tensorboard", "false"], "metrics.enable_tensorboard", False),
        (["--metrics.enable_tensorboard=False"], "metrics.enable_tensorboard", False),
        (["--optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--training.max_norm", "inf"], "training.max_norm", float("inf")),
        (["--compile.components", "model,loss"], "compile.components", ["model", "loss"]),
        (["--compile.components", "model, loss"], "compile.components", ["model", "loss"]),
        (["--compile.components", "loss"], "compile.components", ["loss"]),
        (["--compile.components="], "compile.components", []),
        (["--compile.components", '["loss"]'], "compile.components", ["loss"]),
        (
            ["--parallelism.module_fqns_per_model_part", '[["a", "b"], ["c"]]'],
            "parallelism.module_fqns_per_model_part",
            [["a", "b"], ["c"]],
        ),
        (
            ["--parallelism.context_parallel_load_balancer=None"],
            "parallelism.context_parallel_load_balancer",
            None,
        ),
        (["--debug.seed", "None"], "debug.seed", None),
        (["--data.mixture.code.weight", "2"], "data.mixture.code.weight", 2.0),
        (["--data.mixture.a-1_B.text_column=x"], "data.mixture.a-1_B.text_column", "x"),
        (["--parallelism.sharding_strategy", "3"], "parallelism.sharding_strategy", 3),
        (["--parallelism.sharding_strategy", "NO_SHARD"], "parallelism.sharding_strategy", "NO_SHARD"),
        (["--parallelism.sharding_strategy", "None"], "parallelism.sharding_strategy", None),
        (["--parallelism.fsdp_reshard_after_forward", "2"], "parallelism.fsdp_reshard_after_forward", 2),
        (
            ["--parallelism.fsdp_reshard_after_forward=never"],
            "parallelism.fsdp_reshard_after_forward",
            "never",
        ),
        (["--job.description", "7"], "job.description", "7"),
        (["--job.description=--x = y"], "job.description", "--x = y"),
        (["--job.description="], "job.description", ""),
        (["--quantize.linear.float8.emulate"], "quantize.linear.float8.emulate", True),
        (["--debug"], "job.debug", True),
        (["--training.seq-len", "256"], "training.seq_len", 256),
        (["--training.seq-len=256"], "training.seq_len", 256),
        (
            ["--activation-checkpoint.selective-ac-option", "op"],
            "activation_checkpoint.selective_ac_option",
            "op",
        ),
        (["--metrics.no-enable-tensorboard"], "metrics.enable_tensorboard", False),
        (["--metrics.no_enable_tensorboard"], "metrics.enable_tensorboard", False),
        (["--model.no-add-bos-token"], "model.add_bos_token", False),
        (["--checkpoint.enable", "--checkpoint.no-enable"], "checkpoint.enable", False),
        (["--optimizer.no-decay", "*norm*"], "optimizer.no_decay", ["*norm*"]),
        (["--data.mixture.my-web.text-column", "x"], "data.mixture.my-web.text_column", "x"),
        (["--data.columns", "prompt=true"], "data.columns", {"prompt": "true"}),
        (
            ["--data.chat_template_kwargs", "think=false,day=1"],
            "data.chat_template_kwargs",
            {"think": False, "day": "1"},
        ),
    ],
)
def test_override(words: list[str], key: str, value: object) -> None:
    config = load_config(words)
    assert config.value(key) == value and type(config.value(key)) is type(value)


@pytest.mark.parametrize("table", ["data.mixture", "data.mixture.NAME", "data.mixture.code"])
def test_help_lists_a_table_of_tables(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help", table])
    shown = capsys.readouterr().out
    assert "[data.mixture.NAME]" in shown and "--data.mixture.NAME.weight float  (default 1.0)" in shown
    assert "--data.packing" not in shown


def test_help_lists_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help", "parallelism"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--parallelism.data_parallel_shard_degree -1|int  (default -1)" in shown
    assert "--training.steps" not in shown
    assert "[only with parallelism.tensor_parallel_degree above 1]" in " ".join(shown.split())


def test_help_whose_reader_has_gone_ends_quietly():
    """``--help | head``: the pipe is closed while there is text left."""
    told = subprocess.Popen(
        [sys.executable, "-m", "toolkit.train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    told.stdout.close()
    assert (told.stderr.read(), told.wait()) == (b"", -signal.SIGPIPE)


@pytest.mark.parametrize("key", UNSUPPORTED)
def test_a_key_that_does_not_act_takes_its_default_and_nothing_else(key: str, tmp_path: Path) -> None:
    default, reason = UNSUPPORTED[key]
    table, _, name = key.rpartition(".")
    load(tmp_path, f"[{table}]\n{name} = {format_toml(default)}\n")
    word = ",".join(default) if isinstance(default, list) else format_toml(default).strip('"')
    assert load_config([f"--{key}={word}"]) == load_config([])
    other = {bool: not default, int: 2}.get(type(default), "other")
    with pytest.raises(ConfigError) as error:
        load_config([f"--{key}={str(other).lower()}"])
    [problem] = error.value.problems
    assert problem.key == key and problem.rule == reason and "the default" in problem.fix
