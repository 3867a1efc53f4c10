"""The integration tests of torchtitan 0.2.2 for Llama 3, as its users would give them to this toolkit.

A flavor is one or two commands on the same folder, each the flags that torchtitan's test adds to its
``integration.toml``; the names are torchtitan's. ``{folder}`` is the folder of the flavor's runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONFIG_FILE = Path(__file__).parent / "config" / "torchtitan" / "integration.toml"
GENERATE = "generate"
"""In place of flags: torchtitan's script for text from a checkpoint, which is ``generate`` here."""


@dataclass(frozen=True)
class Flavor:
    """``refused`` names the key for which a CPU run is refused before it starts, if it is."""

    name: str
    ranks: int
    commands: tuple[str, ...]
    refused: str = ""


def _flavor(name: str, ranks: int, *commands: str, refused: str = "") -> Flavor:
    return Flavor(name, ranks, commands, refused)


_PP = "--parallelism.pipeline_parallel_degree"
_SCHEDULE = "--parallelism.pipeline_parallel_schedule"
_SHARD = "--parallelism.data_parallel_shard_degree"
_REPLICATE = "--parallelism.data_parallel_replicate_degree"
_TP = "--parallelism.tensor_parallel_degree"
_CP = "--parallelism.context_parallel_degree"
_BY_OP = "--activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op"
_BY_OP_EQUALS = "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op"
_OFFLOAD = "--training.enable_cpu_offload --optimizer.early_step_in_backward"

FLAVORS = [
    _flavor("default", 4, "--profiling.enable_profiling --metrics.enable_tensorboard"),
    _flavor("1d_compile", 4, "--compile.enable"),
    _flavor("1d_compile_sac_op", 4, f"--compile.enable {_BY_OP}"),
    _flavor("2d_eager", 4, f"{_TP} 2"),
    _flavor("2d_compile", 4, f"--compile.enable {_TP} 2"),
    _flavor("full_checkpoint", 4, "--checkpoint.enable", "--checkpoint.enable --training.steps 20"),
    _flavor(
        "model_only_hf_checkpoint",
        4,
        "--checkpoint.enable --checkpoint.folder hf_checkpoint --checkpoint.last_save_model_only "
        "--checkpoint.last_save_in_hf",
        "--checkpoint.enable --checkpoint.initial_load_path {folder}/hf_checkpoint/step-10/ "
        "--checkpoint.initial_load_model_only --checkpoint.initial_load_in_hf",
    ),
    _flavor("last_save_model_only_fp32", 4, "--checkpoint.enable --checkpoint.last_save_model_only"),
    _flavor(
        "last_save_model_only_bf16",
        4,
        "--checkpoint.enable --checkpoint.last_save_model_only --checkpoint.export_dtype bfloat16",
    ),
    _flavor("pp_looped_zero_bubble", 4, f"{_PP} 4 {_SCHEDULE} InterleavedZeroBubble"),
    _flavor("pp_zbv", 2, f"{_PP} 2 {_SCHEDULE} ZBVZeroBubble"),
    _flavor("pp_1f1b", 2, f"{_PP} 2 {_SCHEDULE} 1F1B {_SHARD} 1"),
    _flavor("pp_gpipe", 2, f"{_PP} 2 {_SCHEDULE} GPipe {_SHARD} 1"),
    _flavor(
        "pp_dp_1f1b",
        4,
        f"{_PP} 2 {_SCHEDULE} 1F1B {_SHARD} 2",
        f"{_PP} 2 {_SCHEDULE} 1F1B --parallelism.pipeline_parallel_layers_per_stage 4 {_SHARD} 2",
    ),
    _flavor("pp_dp_gpipe", 4, f"{_PP} 2 {_SCHEDULE} GPipe {_SHARD} 2"),
    _flavor("pp_tp", 4, f"{_PP} 2 {_TP} 2"),
    _flavor(
        "pp_dp_tp",
        8,
        f"--checkpoint.enable {_PP} 2 {_SHARD} 2 {_TP} 2",
        f"--training.steps 20 --checkpoint.enable {_PP} 2 {_SHARD} 2 {_TP} 2",
    ),
    _flavor("3d_compile", 8, f"{_PP} 2 {_SHARD} 2 {_TP} 2 --compile.enable"),
    _flavor(
        "pp_looped_1f1b",
        4,
        f"{_PP} 4 {_SCHEDULE} Interleaved1F1B",
        f"{_PP} 4 {_SCHEDULE} Interleaved1F1B --parallelism.pipeline_parallel_layers_per_stage 1",
    ),
    _flavor(
        "pp_custom_csv",
        2,
        f"{_PP} 2 {_SCHEDULE} PipelineScheduleMulti "
        "--parallelism.pipeline_parallel_schedule_csv ./tests/assets/custom_schedule.csv",
    ),
    _flavor("optimizer_foreach", 2, "--optimizer.name AdamW --optimizer.implementation foreach"),
    _flavor("ddp", 4, f"{_SHARD}=1 {_REPLICATE}=4"),
    _flavor("hsdp", 4, f"{_SHARD}=2 {_REPLICATE}=2"),
    _flavor(
        "fsdp+flex_attn",
        4,
        f"{_SHARD}=4 --activation_checkpoint.mode='full' --model.flavor=debugmodel_flex_attn",
    ),
    _flavor(
        "fsdp+flex_attn+per_op_sac", 4, f"{_SHARD}=4 {_BY_OP_EQUALS} --model.flavor=debugmodel_flex_attn"
    ),
    _flavor(
        "fsdp+varlen_attn+per_op_sac", 4, f"{_SHARD}=4 {_BY_OP_EQUALS} --model.flavor=debugmodel_varlen_attn"
    ),
    _flavor("cp_allgather", 4, f"{_CP}=4 --parallelism.context_parallel_rotate_method='allgather'"),
    _flavor("cp_alltoall", 4, f"{_CP}=4 --parallelism.context_parallel_rotate_method='alltoall'"),
    _flavor("hsdp+tp", 8, f"{_SHARD}=2 {_REPLICATE}=2 {_TP}=2"),
    _flavor("fsdp+cp", 4, f"{_SHARD}=2 {_CP}=2"),
    _flavor("hsdp+cp_without_dp_shard", 4, f"{_SHARD}=1 {_REPLICATE}=2 {_CP}=2"),
    _flavor("hsdp+cp_with_dp_shard", 8, f"{_SHARD}=2 {_REPLICATE}=2 {_CP}=2"),
    _flavor("fsdp+tp+cp", 8, f"{_SHARD}=2 {_TP}=2 {_CP}=2"),
    _flavor(
        "cpu_offload+opt_in_bwd+TP+DP+CP",
        8,
        f"--checkpoint.enable {_TP}=2 {_CP}=2 {_OFFLOAD}",
        f"{_TP}=2 {_CP}=2 {_REPLICATE}=2 {_OFFLOAD}",
        refused="training.enable_cpu_offload",
    ),
    _flavor("test_generate", 2, "--checkpoint.enable", GENERATE),
    _flavor("fsdp_reshard_always", 2, "--parallelism.fsdp_reshard_after_forward always"),
    _flavor(
        "optional_checkpoint",
        4,
        "--checkpoint.enable --training.steps 10",
        "--checkpoint.enable --checkpoint.exclude_from_loading lr_scheduler,dataloader,optimizer "
        f"{_TP} 2 --training.steps 20",
    ),
    _flavor(
        "float8_emulation",
        4,
        "--model.converters quantize.linear.float8 --quantize.linear.float8.enable_fsdp_float8_all_gather "
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp --quantize.linear.float8.emulate",
    ),
    _flavor("gradient_accumulation", 2, "--training.local_batch_size 8 --training.global_batch_size 32"),
    _flavor(
        "validation_tp_cp_pp",
        8,
        f"--validation.enable --validation.dataset c4_test {_TP}=2 {_CP}=2 {_PP}=2 {_SCHEDULE} "
        "Interleaved1F1B",
    ),
    _flavor(
        "dataloader_kwargs",
        2,
        "--training.dataloader.num_workers 2 --training.dataloader.pin_memory "
        "--training.dataloader.persistent_workers --training.dataloader.prefetch_factor 4",
    ),
]
