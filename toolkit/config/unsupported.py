"""Unsupported keys of torchtitan and of earlier releases: accepted with their defaults, otherwise
rejected."""

from __future__ import annotations

_NO_DEEPEP = "tokens are sent to experts by all-to-all; other libraries are not supported"
_NO_OVERLAP = "the all-to-all of experts does not overlap with other stages' computation"
NO_GROUPED = "matmuls of experts have no low precision"
_ROUTER_MM = "modes op and matmul save the router's choice of experts without it"
NO_MX = (
    "MX formats are not supported: they need GPUs of compute capability 10.0 or above, on which this toolkit "
    "has not been run"
)
NO_EXPRESSION = (
    "schedules by expression have been removed: register a function instead (docs/extending.md, "
    "A learning-rate schedule)"
)
_FAST_PATHS = "training.cpu_fast_paths = false disables this and all other fast paths of CPUs"
_NO_TORCHFT = "fault tolerance through torchft is not supported"
_NO_MODULE = "register tables and keys in a module set by job.custom_import"
_NO_QUANTIZED = "quantized Hugging Face weights are only published for mixture-of-experts models"

_Keys = dict[str, tuple[bool | int | str | list[str] | None, str]]

REMOVED: _Keys = {
    "model.matmul": ("auto", _FAST_PATHS),
    "model.norm": ("auto", _FAST_PATHS),
    "parallelism.fsdp_shared_memory": (True, _FAST_PATHS),
    "lr_scheduler.expression": (None, NO_EXPRESSION),
}
"""Keys of the previous release."""
UNSUPPORTED: _Keys = REMOVED | {
    "job.custom_config_module": ("", _NO_MODULE),
    "parallelism.pipeline_parallel_expert_parallel_overlap": (True, _NO_OVERLAP),
    "parallelism.expert_parallel_comm_backend": ("standard", _NO_DEEPEP),
    "checkpoint.enable_ft_dataloader_checkpoints": (True, _NO_TORCHFT),
    "checkpoint.initial_load_in_hf_quantized": (False, _NO_QUANTIZED),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (["moe.router.gate"], _ROUTER_MM),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": ("triton", NO_MX),
    "quantize.linear.mx.recipe_name": ("mxfp8_cublas", NO_MX),
    "quantize.linear.mx.filter_fqns": (["output"], NO_MX),
    "quantize.grouped_mm.float8.fqns": ([], NO_GROUPED),
    "quantize.grouped_mm.mx.recipe_name": ("mxfp8", NO_GROUPED),
    "quantize.grouped_mm.mx.fqns": ([], NO_GROUPED),
    "memory_estimation.disable_fake_mode": (False, "an estimate needs no device and no memory"),
    "fault_tolerance.enable": (False, _NO_TORCHFT),
    "fault_tolerance.process_group": ("gloo", _NO_TORCHFT),
    "fault_tolerance.process_group_timeout_ms": (10000, _NO_TORCHFT),
    "fault_tolerance.replica_id": (0, _NO_TORCHFT),
    "fault_tolerance.group_size": (0, _NO_TORCHFT),
    "fault_tolerance.min_replica_size": (1, _NO_TORCHFT),
    "fault_tolerance.semi_sync_method": (None, _NO_TORCHFT),
    "experimental.custom_import": ("", "use job.custom_import"),
    "experimental.custom_args_module": ("", _NO_MODULE),
}
"""Key → default, and why no other value is supported."""
