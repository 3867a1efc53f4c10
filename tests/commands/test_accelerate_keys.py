"""Every key of accelerate's configuration: what it is here, or why it is refused."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest

from toolkit.commands.accelerate.read import ALIASES, KEYS, TABLES, Given
from toolkit.commands.import_accelerate import Imported, translate


def explained(**values: Any) -> Imported:
    """These keys beside the one that asks for FSDP, as they are here."""
    base = {"distributed_type": "FSDP"}
    return translate([Given(name, value, "a.yaml:1") for name, value in (base | values).items()])


_P = "parallelism."
MEANINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"compute_environment": "LOCAL_MACHINE"}, {}),
    ({"distributed_type": "FSDP"}, {}),
    ({"debug": False}, {}),
    ({"debug": True}, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    ({"mixed_precision": "bf16"}, {"training.mixed_precision_param": "bfloat16"}),
    ({"mixed_precision": "no"}, {"training.mixed_precision_param": "float32"}),
    ({"mixed_precision": False}, {"training.mixed_precision_param": "float32"}),  # YAML's reading of no
    ({"use_cpu": True}, {"training.device": "cpu"}),
    ({"use_cpu": False}, {"training.device": "auto"}),
    ({"num_processes": 2}, {"NGPU": 2}),
    ({"num_processes": -1}, {}),
    ({"num_processes": 16, "num_machines": 2}, {"NGPU": 8, "NNODES": 2}),
    ({"num_machines": 1}, {}),
    ({"machine_rank": 0}, {}),
    ({"num_machines": 3, "machine_rank": 2}, {"NNODES": 3, "NODE_RANK": 2}),
    ({"num_machines": 2, "main_process_ip": "10.0.0.1"}, {"NNODES": 2, "MASTER_ADDR": "10.0.0.1"}),
    ({"main_process_port": 2222}, {"MASTER_PORT": 2222}),
    ({"rdzv_backend": "c10d"}, {"rdzv_backend": "c10d"}),
    ({"same_network": True}, {}),
    ({"gpu_ids": "all"}, {}),
    ({"gpu_ids": "0,3"}, {"CUDA_VISIBLE_DEVICES": "0,3"}),
    ({"gpu_ids": [0, 3]}, {"CUDA_VISIBLE_DEVICES": "0,3"}),
    ({"mixed_precision": None, "fsdp_offload_params": None, "main_process_ip": None}, {}),
    ({"main_training_function": "main"}, {}),
    ({"enable_cpu_affinity": False}, {}),
    ({"fsdp_version": 1}, {}),
    ({"fsdp_version": "2"}, {}),
    ({"fsdp_sharding_strategy": "full_shard"}, {f"{_P}sharding_strategy": "FULL_SHARD"}),
    ({"fsdp_reshard_after_forward": True}, {f"{_P}fsdp_reshard_after_forward": "always"}),
    ({"fsdp_reshard_after_forward": "false"}, {f"{_P}fsdp_reshard_after_forward": "never"}),
    ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {f"{_P}sharding_strategy": "SHARD_GRAD_OP"}),
    (
        {"fsdp_sharding_strategy": 2, "fsdp_reshard_after_forward": False},
        {f"{_P}sharding_strategy": "SHARD_GRAD_OP"},
    ),
    ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {f"{_P}fsdp_wrap_policy": "class"}),
    ({"fsdp_auto_wrap_policy": "size_based_wrap"}, {f"{_P}fsdp_wrap_policy": "size"}),
    (
        {"fsdp_auto_wrap_policy": "NO_WRAP"},
        {f"{_P}fsdp_wrap_policy": "size", f"{_P}fsdp_min_num_params": 10**15},
    ),
    (
        {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP"},
        {f"{_P}fsdp_wrap_policy": "class", f"{_P}fsdp_wrap_classes": ["TransformerBlock", "FeedForward"]},
    ),
    (
        {"fsdp_transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
        {f"{_P}fsdp_wrap_policy": "class", f"{_P}fsdp_wrap_classes": ["TransformerBlock"]},
    ),
    (
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "BertLayer"},
        {f"{_P}fsdp_wrap_policy": "size"},
    ),
    (
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "1e8"},  # which YAML leaves text
        {f"{_P}fsdp_wrap_policy": "size", f"{_P}fsdp_min_num_params": 10**8},
    ),
    ({"fsdp_min_num_params": 0}, {}),
    ({"fsdp_backward_prefetch": "BACKWARD_PRE"}, {f"{_P}fsdp_backward_prefetch": 1}),
    ({"fsdp_backward_prefetch_policy": "BACKWARD_PRE"}, {f"{_P}fsdp_backward_prefetch": 1}),
    ({"fsdp_forward_prefetch": True}, {f"{_P}fsdp_forward_prefetch": 1}),
    ({"fsdp_forward_prefetch": False}, {f"{_P}fsdp_forward_prefetch": 0}),
    ({"fsdp_offload_params": True}, {"training.enable_cpu_offload": True}),
    ({"fsdp_cpu_offload": False}, {"training.enable_cpu_offload": False}),
    ({"fsdp_offload_params": True, "use_cpu": True}, {"training.device": "cpu"}),
    ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, {"checkpoint.enable": True}),
    ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, {"checkpoint.enable": True}),
    (
        {"fsdp_state_dict_type": "FULL_STATE_DICT"},
        {"checkpoint.enable": True, "checkpoint.last_save_in_hf": True},
    ),
    ({"fsdp_cpu_ram_efficient_loading": True}, {}),
    ({"fsdp_sync_module_states": True}, {}),
    ({"fsdp_use_orig_params": True}, {}),
    ({"fsdp_limit_all_gathers": True}, {}),
    ({"fsdp_activation_checkpointing": True}, {"activation_checkpoint.mode": "full"}),
    ({"fsdp_activation_checkpointing": False}, {"activation_checkpoint.mode": "none"}),
    ({"fsdp_activation_checkpointing_offload": False}, {}),
    ({"fsdp_activation_checkpointing_offload": True}, {}),
    (
        {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
        {"activation_checkpoint.mode": "full", "activation_checkpoint.enable_activation_offloading": True},
    ),
    ({"fsdp_ignored_modules": None}, {}),
    ({"dynamo_backend": "NO"}, {"compile.enable": False}),
    (
        {"dynamo_backend": "INDUCTOR", "dynamo_use_fullgraph": False, "dynamo_mode": "default"},
        {"compile.enable": True, "compile.backend": "inductor", "compile.fullgraph": False},
    ),
    (
        {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead"},
        {"compile.enable": True, "compile.backend": "inductor", "compile.mode": "reduce-overhead"},
    ),
    ({"dynamo_mode": "reduce-overhead"}, {}),
    ({"dynamo_use_fullgraph": False}, {}),
    ({"dynamo_use_dynamic": False}, {}),
    ({"dynamo_use_regional_compilation": True}, {}),
    ({"parallelism_config_dp_replicate_size": 2}, {f"{_P}data_parallel_replicate_degree": 2}),
    ({"parallelism_config_dp_shard_size": 4}, {f"{_P}data_parallel_shard_degree": 4}),
    ({"parallelism_config_tp_size": 2}, {f"{_P}tensor_parallel_degree": 2}),
    (
        {"parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "alltoall"},
        {f"{_P}context_parallel_degree": 2, f"{_P}context_parallel_rotate_method": "alltoall"},
    ),
    ({"parallelism_config_cp_comm_strategy": "allgather"}, {}),
    ({"parallelism_config_cp_backend": "torch"}, {}),
    ({"parallelism_config_sp_size": 1, "parallelism_config_sp_backend": "deepspeed"}, {}),
    ({"parallelism_config_sp_seq_length": None, "parallelism_config_sp_seq_length_is_variable": True}, {}),
    ({"parallelism_config_sp_attn_implementation": "sdpa"}, {}),
    *(({name: {}}, {}) for name in ("deepspeed_config", "megatron_lm_config", "mpirun_config", "fp8_config")),
    ({"downcast_bf16": "no", "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}, {}),
    ({"tpu_name": None, "tpu_zone": None, "tpu_vm": None, "commands": None, "command_file": None}, {}),
    ({"xla": False, "xla_fsdp_v2": False, "xla_fsdp_settings": {}, "xla_fsdp_grad_ckpt": False}, {}),
]


@pytest.mark.parametrize(("keys", "expected"), MEANINGS)
def test_a_key_is_set_or_needs_nothing_here_and_says_why(
    keys: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = explained(**keys)
    assert not found.problems
    assert found.settings | found.launch == expected
    assert len(found.lines) == len({"distributed_type", *keys})
    for name, line in zip(keys, found.lines[-len(keys) :], strict=True):
        assert line.startswith(f"{name} = ") and " -> " in line and line.endswith(")")


def test_no_key_was_left_out_above() -> None:
    assert {ALIASES.get(name, name) for keys, _ in MEANINGS for name in keys} == set(KEYS)


def test_every_key_that_accelerate_and_a_trainer_read_is_known() -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    launch = pytest.importorskip("accelerate.commands.launch")
    named = {field.name for field in fields(config_args.ClusterConfig)} - set(TABLES)
    flags = {action.dest for action in launch.launch_command_parser()._actions}
    named |= {name for name in flags if name.startswith(("fsdp_", "tpu_", *TABLES.values()))}
    source = inspect.getsource(pytest.importorskip("transformers").TrainingArguments)
    trainers = set(re.findall(r'self\.fsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"', source))
    assert len(trainers) > 5
    named |= {name if name in KEYS else f"fsdp_{name}" for name in trainers}
    assert sorted(named - set(KEYS) - set(ALIASES)) == []


def test_a_strategy_that_is_none_is_told_once() -> None:
    found = explained(fsdp_sharding_strategy=7, fsdp_reshard_after_forward=True)
    assert [problem.key for problem in found.problems] == ["fsdp_sharding_strategy"]


TPU = "TPUs need separate APIs"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    *(({name: value}, TPU, "remove it") for name, value in {
        "downcast_bf16": "yes", "tpu_env": ["A=1"], "tpu_use_cluster": True, "tpu_use_sudo": True,
        "tpu_name": "pod", "tpu_zone": "us-1", "tpu_vm": ["a"], "commands": ["ls"], "command_file": "file",
        "xla": True, "xla_fsdp_v2": True, "xla_fsdp_settings": {"a": 1}, "xla_fsdp_grad_ckpt": True,
    }.items()),
    ({"distributed_type": "XLA"}, TPU, "FSDP"),
    ({"distributed_type": "MULTI_GPU"}, "for FSDP", "NO_SHARD"),
    ({"distributed_type": "DEEPSPEED"}, "for FSDP", "docs/migration.md"),
    ({"compute_environment": "AMAZON_SAGEMAKER"}, "SageMaker", "LOCAL_MACHINE"),
    ({"mixed_precision": "fp16"}, "loss scaling", "bf16, or no, which is fp32"),
    ({"mixed_precision": "fp8"}, "float8", "bf16"),
    ({"fsdp_backward_prefetch": "BACKWARD_POST"}, "asks later", "BACKWARD_PRE"),
    ({"fsdp_backward_prefetch": "NO_PREFETCH"}, "always asks ahead", "BACKWARD_PRE"),
    ({"fsdp_transformer_layer_cls_to_wrap": "BertLayer"}, "no BertLayer", "did you mean TransformerBlock?"),
    ({"fsdp_transformer_layer_cls_to_wrap": "BertLayer"}, "no BertLayer", "LlamaDecoderLayer is taken"),
    ({"fsdp_sharding_strategy": 6}, "5 HYBRID_SHARD_ZERO2", "one of these"),
    ({"fsdp_sharding_strategy": True}, "must be FULL_SHARD", ""),
    ({"fsdp_sharding_strategy": "FULL_SHRAD"}, "must be", "did you mean FULL_SHARD?"),
    ({"fsdp_sharding_strategy": 1, "fsdp_reshard_after_forward": False}, "which frees gathered", "keep one"),
    ({"fsdp_sharding_strategy": 2, "fsdp_reshard_after_forward": True}, "is SHARD_GRAD_OP, which keeps", ""),
    ({"fsdp_sharding_strategy": 1, "fsdp_reshard_after_forward": "NO_SHARD"}, "is FULL_SHARD", "keep one"),
    ({"fsdp_sharding_strategy": 1, "parallelism_config_dp_replicate_size": 2}, "replicas", "HYBRID_SHARD"),
    ({"fsdp_auto_wrap_policy": "NO_WRAPS"}, "must be", "did you mean NO_WRAP?"),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 0}, "at least 1", ""),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": "many"}, "whole number", ""),
    ({"fsdp_offload_params": "maybe"}, "true or false", ""),
    ({"fsdp_state_dict_type": "DICT"}, "SHARDED_STATE_DICT", ""),
    ({"fsdp_ignored_modules": "lm_head"}, "every module", "remove it"),
    ({"fsdp_version": 3}, "1 or 2", ""),
    ({"num_processes": 3, "num_machines": 2}, "not a multiple of num_machines", "2, 4 or more"),
    ({"num_processes": 0}, "at least 1", ""),
    ({"num_machines": 2, "machine_rank": 2}, "the last is 1", ""),
    ({"main_process_port": 70000}, "65535", ""),
    ({"rdzv_backend": "zookeeper"}, "static", ""),
    ({"enable_cpu_affinity": True}, "not bound", "numactl"),
    ({"dynamo_mode": "max-autotune"}, "must be default, reduce-overhead or", "max-autotune-no-cudagraphs"),
    ({"dynamo_use_dynamic": True}, "fixed", ""),
    ({"parallelism_config_sp_size": 2}, "DeepSpeed", "cp_size"),
    ({"deepspeed_config": {"zero_stage": 3}}, "DeepSpeed", "docs/migration.md"),
    ({"megatron_lm_config": {"tp": 2}}, "Megatron-LM", "docs/migration.md"),
    ({"mpirun_config": {"hostfile": "a"}}, "mpirun", "run_train.sh"),
    ({"fp8_config": {"backend": "TE"}}, "float8", ""),
    ({"fsdp_shardng_strategy": 1}, "no such key", "did you mean fsdp_sharding_strategy?"),
    ({"mixd_precision": "bf16"}, "no such key", "did you mean mixed_precision?"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "rule", "fix"), REFUSED)
def test_what_is_not_to_be_had_is_refused_with_the_reason(keys: dict[str, Any], rule: str, fix: str) -> None:
    (problem,) = explained(**keys).problems
    assert problem.key in keys and problem.value == keys[problem.key] and problem.origin == "a.yaml:1"
    assert rule in problem.rule and fix in problem.fix
