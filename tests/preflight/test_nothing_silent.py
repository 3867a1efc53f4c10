"""Every key of the schema acts, or is refused or noted by name where it does not.

A new key fails here until it is marked with what it acts with (``OnlyWith``, ``Needs``), rejected by a rule,
or listed.
"""

from __future__ import annotations

import typing
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Interval, Lt

from tests.preflight.bad_runs import CPU, configure
from toolkit.config.schema import NAME, Field, fields, fields_by_key
from toolkit.config.types import Needs, OnlyWith
from toolkit.config.values import format_toml
from toolkit.preflight import check, notes
from toolkit.preflight.planned_run import PlannedRun
from toolkit.preflight.rules.options import FACTS

SWITCH = {
    "activation_checkpoint.selective_ac_option": "activation_checkpoint.mode=none",
    "activation_checkpoint.early_stop": "activation_checkpoint.mode=none",
    "activation_checkpoint.preserve_rng_state": "activation_checkpoint.mode=none",
    "activation_checkpoint.determinism_check": "activation_checkpoint.mode=none",
    "activation_checkpoint.debug": "activation_checkpoint.mode=none",
    "comm.save_traces_folder": "comm.trace_buf_size=0",
    "comm.save_traces_file_prefix": "comm.trace_buf_size=0",
    "compile.cache_folder": "model.attention=sdpa",
    "lr_scheduler.decay_ratio": "lr_scheduler.decay_type=constant",
    "lr_scheduler.min_lr_factor": "lr_scheduler.decay_type=constant",
    "metrics.save_tb_folder": "metrics.enable_tensorboard=false",
    "optimizer.implementation": "optimizer.name=AdamW8bit",
    "parallelism.fsdp_backward_prefetch": "parallelism.sharding_strategy=NO_SHARD",
    "parallelism.fsdp_forward_prefetch": "parallelism.sharding_strategy=NO_SHARD",
}
"""Keys that act at the defaults of the others, and what turns them off."""

ACTS = {
    "job.dump_folder",
    "job.custom_import",
    "job.description",
    "job.print_config",
    "job.save_config_file",
    "job.debug",
    "profiling.enable_profiling",
    "metrics.log_freq",
    "metrics.enable_tensorboard",
    "metrics.disable_color_printing",
    "metrics.save_for_all_ranks",
    "metrics.peak_tflops",
    "metrics.fingerprint_every",
    "metrics.prometheus_file",
    "health.nan_policy",
    "health.loss_spike_policy",
    "health.straggler_factor",
    "health.heartbeat_seconds",
    "model.name",
    "model.flavor",
    "model.hf_assets_path",
    "model.tokenizer_path",
    "model.dim",
    "model.n_layers",
    "model.n_heads",
    "model.n_kv_heads",
    "model.ffn_dim",
    "model.head_dim",
    "model.vocab_size",
    "model.max_seq_len",
    "model.norm_eps",
    "model.rope_theta",
    "model.rope_scaling_factor",
    "model.tie_embeddings",
    "model.attention",
    "training.cpu_fast_paths",
    "model.add_bos_token",
    "model.additional_special_tokens",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.groups.NAME.lr",
    "optimizer.groups.NAME.name",
    "optimizer.groups.NAME.weight_decay",
    "optimizer.layer_lr_decay",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.warmup_ratio",
    "lr_scheduler.decay_type",
    "loss.label_smoothing",
    "loss.z_loss",
    "training.epochs",
    "training.local_batch_size",
    "training.global_batch_size",
    "training.seq_len",
    "training.max_norm",
    "training.steps",
    "training.enable_cpu_offload",
    "training.dtype",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.gc_freq",
    "training.gc_debug",
    "training.loss_chunk_tokens",
    "training.dataloader.num_workers",
    "finetune.adapter",
    "finetune.classification.num_labels",
    "finetune.neftune_noise_alpha",
    "finetune.freeze_first_layers",
    "finetune.freeze_last_layers",
    "training.format",
    "data.format",
    "data.packing",
    "data.document_mask",
    "data.shuffle",
    "data.streaming",
    "data.cache_folder",
    "data.max_inline_gb",
    "data.mixture.NAME.weight",
    "data.mixture.NAME.format",
    *(field.key for field in fields() if field.table == "phases.NAME"),
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.sharding_strategy",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.fsdp_wrap_policy",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree",
    "checkpoint.enable",
    "activation_checkpoint.mode",
    "compile.enable",
    "validation.enable",
    "evaluation.tasks",
    "distillation.enable",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "comm.trace_buf_size",
    "comm.save_timeout_seconds",
    "comm.mode",
    "memory_estimation.enable",
    "debug.seed",
    "debug.deterministic",
}
"""Keys that act in any run, or turn something on."""

FREE = {
    "job.custom_import",  # which is imported before anything is checked: tests/extensions/test_extensions.py
    "job.dump_folder",
    "job.description",
    "job.save_config_file",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "metrics.save_tb_folder",
    "model.additional_special_tokens",
    "data.cache_folder",
    "checkpoint.folder",
    "compile.cache_folder",
    "comm.save_traces_folder",
    "comm.save_traces_file_prefix",
    "evaluation.tasks",  # which lm-eval knows: test_evaluation.py
    "evaluation.task_folder",
    "validation.dataset_path",
    "validation.dataset_subset",
    "validation.dataset_split",
    "parallelism.pipeline_parallel_schedule_csv",
    "quantize.linear.float8.filter_fqns",
}
"""Keys of text or lists of text that some use takes whatever they hold."""

KEYS = [field for field in fields() if field.key != "job.config_file"]


def _other(field: Field) -> Any:
    """A value that the type of a key allows and that is not the default; None where there is none."""
    values = _values(field.annotation, field.marks)
    return next((value for value in values if value != field.default), None)


def _values(annotation: Any, marks: tuple[Any, ...] = ()) -> list[Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _values(arguments[0], arguments[1:])
    if origin is Literal:
        return list(arguments)
    if origin is list:
        return [[value] for value in _values(arguments[0])]
    if origin is dict:
        return [{"2": "3"}]
    if arguments:
        return [value for alternative in arguments for value in _values(alternative, marks)]
    if annotation is float and any(isinstance(mark, Interval | Lt) for mark in marks):
        return [0.5, 0.25]
    return {bool: [True, False], int: [2, 3], float: [2.0, 3.0], str: ["2", "3"], NoneType: []}[annotation]


def _said(field: Field, value: Any, *, noted: bool, switch: str = "") -> str:
    """Problems and notes of a run of two ranks where one key is set."""
    text = value if isinstance(value, str) else format_toml(value)
    flags = [f"--{field.key.replace(NAME, 'part')}={text}", *([f"--{switch}"] if switch else [])]
    config = configure(flags)
    said = [str(problem) for problem in check(config, world_size=2, hardware=CPU)]
    return "\n".join([*said, *(notes(config, world_size=2, hardware=CPU) if noted else [])])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


IDLE = [field for field in KEYS if field.key not in ACTS and _other(field) is not None]


@pytest.mark.parametrize("field", IDLE, ids=lambda field: field.key)
def test_what_does_not_act_is_named(field: Field) -> None:
    said = _said(field, _other(field), noted=True, switch=SWITCH.get(field.key, ""))
    assert field.key.replace(NAME, "part") in said


def _is_text(field: Field) -> bool:
    return isinstance(value := _other(field), str | list) and value in ("2", ["2"], [["2"]])


RESTRICTED = [field for field in KEYS if _is_text(field) and field.key not in FREE]


@pytest.mark.parametrize("field", RESTRICTED, ids=lambda field: field.key)
def test_what_no_use_allows_is_refused(field: Field) -> None:
    """At the defaults of the others: most of these keys are then not read."""
    wrong = "no such thing"
    value = _other(field)
    value = wrong if isinstance(value, str) else [[wrong]] if isinstance(value[0], list) else [wrong]
    assert f"{field.key.replace(NAME, 'part')} = " in _said(field, value, noted=False)


def test_marks_name_facts_and_keys() -> None:
    for field in fields():
        for mark in field.marks:
            if isinstance(mark, OnlyWith):
                assert mark.switch in fields_by_key()
            elif isinstance(mark, Needs):
                assert mark.what in FACTS or mark.what in fields_by_key()
                assert mark.what not in FACTS or FACTS[mark.what](PlannedRun(configure([]), 2, CPU)) in (0, 1)


def test_a_switch_that_is_idle_itself_is_named_in_the_place_of_its_key() -> None:
    config = configure(["--checkpoint.interval=9", "--checkpoint.export_dtype=bfloat16"])
    assert notes(config, world_size=1, hardware=CPU) == [
        "checkpoint.interval, checkpoint.export_dtype have no effect without checkpoint.enable = true"
    ]
    assert check(config, world_size=1, hardware=CPU) == []


def test_the_lists_name_keys() -> None:
    assert fields_by_key().keys() >= {*SWITCH, *ACTS, *FREE}
    assert not ACTS & SWITCH.keys()
