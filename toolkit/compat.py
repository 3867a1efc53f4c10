"""Private names of torch, each with the reason why no public name suffices, and backports for Python 3.10.

Import torch's private names only from here, by the keys of :data:`PRIVATE`. A name is resolved on first use,
because some load torch's compiler and this file must import without torch. ``tests/test_compat.py`` checks
that each exists and that no other file uses private names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["file_digest", "tomllib"]  # and the names that __getattr__ resolves

if sys.version_info >= (3, 11):
    from hashlib import file_digest

    import tomllib
else:
    import hashlib
    from typing import BinaryIO

    import tomli as tomllib

    def file_digest(file: BinaryIO, kind: str | Callable[[], Any]) -> Any:
        digest = hashlib.new(kind) if isinstance(kind, str) else kind()
        block = memoryview(bytearray(1 << 18))
        while size := file.readinto(block):  # type: ignore[attr-defined]
            digest.update(block[:size])
        return digest


_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:"

PRIVATE = {
    # torch.distributed has no public functional collectives, the only ones that torch.compile traces
    "functional_collectives": "torch:ops._c10d_functional",
    # torch.distributed.Work does not expose its operation
    "work_operation": "torch.distributed:Work._get_op_type",
    # torch.utils.checkpoint wraps functions, not modules
    "ActivationWrapper": f"{_WRAPPER}ActivationWrapper",
    "CheckpointWrapper": f"{_WRAPPER}CheckpointWrapper",
    "checkpoint_wrapper": f"{_WRAPPER}checkpoint_wrapper",
    # torch.utils.checkpoint compares operator counts, which FSDP's hooks change between the two forwards
    "CachedDispatchMode": "torch.utils.checkpoint:_CachedTorchDispatchMode",
    "operator_is_compiled": "torch.utils.checkpoint:_is_compiling",
    # torch.compile has no public way to set these options, add callbacks or find its cache
    "dynamo_config": "torch._dynamo.config:",
    "functorch_config": "torch._functorch.config:",
    "inductor_config": "torch._inductor.config:",
    "compile_callbacks": "torch._dynamo.callback:",
    "default_cache_dir": "torch._inductor.runtime.cache_dir_utils:default_cache_dir",
    "enable_symm_mem_for_group": "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "higher_order_wrap": "torch._higher_order_ops:wrap",
    # torch.compiler cannot mark tensors
    "mark_dynamic": "torch._dynamo:mark_dynamic",
    "mark_static_address": "torch._dynamo:mark_static_address",
    # torch.distributed.tensor does not expose a rank's shape and offset, and from_local() moves its input
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "local_shape_and_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "shape_and_offset_at": "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
    # DTensor caches meshes of destroyed process groups, with no public way to clear them
    "clear_sharding_cache": "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    # DeviceMesh cannot be reshaped publicly
    "flatten_mesh": "torch.distributed.device_mesh:DeviceMesh._flatten",
    "unflatten_mesh": "torch.distributed.device_mesh:DeviceMesh._unflatten",
    # torch.distributed.pipelining cannot load a schedule from a file
    "ScheduleRuntime": "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime",
    "load_schedule": "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._load_csv",
    # torch.distributed.checkpoint does not expose its records of files, which readers of its folders need
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "StoragePrefix": "torch.distributed.checkpoint.filesystem:_StoragePrefix",
    # torch.optim.Adam passes DTensors to its kernels, which dispatch each one separately
    "init_adam_group": "torch.optim:Adam._init_group",
    # torch.autograd does not report a running backward; torch.distributed cannot look up a group by name
    "backward_task": "torch:_C._current_graph_task_id",
    "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    # FSDPModule does not expose which parameters are gathered together, or when
    "fsdp_state": "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    # torch has no public function for these operators
    "foreach_mul_": "torch:_foreach_mul_",
    "foreach_norm": "torch:_foreach_norm",
    "softmax_backward": "torch:_softmax_backward_data",
    "unsafe_view": "torch:ops.aten._unsafe_view",  # a view that autograd does not track as a view
    "weight_norm_backward": "torch:ops.aten._weight_norm_interface_backward",
    # scaled_dot_product_attention neither returns nor accepts log-sum-exps
    "flash_attention": "torch:ops.aten._scaled_dot_product_flash_attention",
    "flash_attention_backward": "torch:ops.aten._scaled_dot_product_flash_attention_backward",
    "flash_attention_cpu": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "flash_attention_cpu_backward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    # torch uses oneDNN's weight layout only in compiled code
    "reorder_linear_weight": "torch:ops.mkldnn._reorder_linear_weight",
    "linear_of_reordered": "torch:ops.mkldnn._linear_pointwise",
    "onednn_has_bf16": "torch:ops.mkldnn._is_mkldnn_bf16_supported",
    # torch.cuda.memory documents memory history and snapshots under private names
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "memory_snapshot": "torch.cuda.memory:_snapshot",
    # torch.cuda has no public warning about reference cycles
    "warn_tensor_cycles": "torch.utils.viz._cycles:warn_tensor_cycles",
    # torch has neither public fake tensors nor public dispatch modes
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor:unset_fake_temporarily",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "tree_iter": "torch.utils._pytree:tree_iter",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",  # registers the fake backend
    "local_scalar": "torch:ops.aten._local_scalar_dense",
}
"""Names in this module and their paths in torch; a comment names the missing public equivalent."""


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = PRIVATE[name].partition(":")
    found: Any = import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    return globals().setdefault(name, found)


# Private attributes of tensors, modules and groups; untyped, because this file does not import torch


def become(module: Any, kind: type) -> None:
    """Change the class of ``module`` to a subclass, as fully_shard and torch.nn.utils.parametrize do.

    No public hook can substitute a parameter within a compiled and checkpointed forward.
    """
    module.__class__ = kind


def parameter(module: Any, name: str) -> Any:
    """Return the parameter ``name`` of a module, even if its class overrides the attribute."""
    return module._parameters[name]


def checkpointed(wrapper: Any) -> Any:
    """Return the module within an :class:`ActivationWrapper`."""
    return wrapper._checkpoint_wrapped_module


def local_tensor(tensor: Any) -> Any:
    """Return the tensor that stores this rank's shard of a DTensor. to_local() is differentiable, waits for
    collectives, and returns a new tensor for a parameter."""
    return tensor._local_tensor


def dtensor_like(shard: Any, other: Any) -> Any:
    """Build a DTensor with the layout of ``other`` from a local ``shard`` on any device. from_local() would
    move the shard to the mesh's device."""
    return type(other)(shard, other._spec, requires_grad=False)


def checkpoint_offset(tensor: Any) -> Any:
    """Return the file offset of a tensor that torch.load mapped to the meta device."""
    return tensor.untyped_storage()._checkpoint_offset


def fuse_collectives(fuse: bool) -> None:
    """Set whether inductor fuses matmuls with adjacent symmetric-memory collectives, in this process."""
    __getattr__("inductor_config")._micro_pipeline_tp = fuse


def process_groups() -> list[Any]:
    """Return all process groups of this process; torch.distributed exposes only the default one."""
    return list(import_module("torch.distributed").distributed_c10d._world.pg_map)


def gloo_options(device: Any, *, threads: int, timeout: Any) -> Any:
    """Build the options of a gloo group, which new_group() does not accept."""
    options = import_module("torch.distributed").ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [device], threads, timeout
    return options


def recorded_collectives(backend: str) -> dict[str, Any]:
    """Return the flight recorder trace of "gloo" or "nccl", which torch otherwise writes only to files; empty
    if torch was built without that backend."""
    names = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    dump = getattr(import_module("torch._C._distributed_c10d"), names[backend], None)
    return json.loads(dump()) if dump else {}


def fsdp_param_group(module: Any) -> Any:
    """Return FSDP's parameter group of ``module``, the parameters gathered together; None without one."""
    return module._get_fsdp_state()._fsdp_param_group


def operator_schema(operator: Any) -> Any:
    """Return the schema of an operator: name, arguments and aliases."""
    return operator._schema


def schedule_actions(schedule: Any, ranks: int, stages: int, micro_batches: int) -> list[Any]:
    """Return each rank's pipeline actions; torch itself computes them only for stages in a process group."""
    instance = schedule.__new__(schedule)
    instance._n_microbatches, instance.pp_group_size = micro_batches, ranks
    instance.n_local_stages = stages // ranks
    instance.num_stages = instance._num_stages = stages
    instance._stages = [None] * (stages // ranks)
    instance.number_of_rounds = max(1, micro_batches // ranks)
    instance.microbatches_per_round = micro_batches // instance.number_of_rounds
    return [instance._calculate_single_rank_operations(rank) for rank in range(ranks)]


def watch_resizes(callback: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``callback`` whenever a storage is resized, as FSDP does to free parameters. Return a function
    that removes the callback.

    Dispatch modes do not see resizes, and FSDPModule has no hook for them. Only the planner, which processes
    no data, uses this.
    """
    storage_class = import_module("torch").UntypedStorage
    resize = storage_class.resize_

    def resize_and_report(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        callback(storage)
        return result

    storage_class.resize_ = resize_and_report
    return lambda: setattr(storage_class, "resize_", resize)


def replace_work_wait(wait: Callable[..., bool]) -> None:
    """Replace torch's wait for collectives and transfers by ``wait``.

    This is the only patch of torch in a run. FSDP and pipeline schedules call ``Work.wait`` themselves, and
    torch has neither a hook for it nor a way to change the timeout of transfers of an existing gloo group.
    """
    import_module("torch.distributed").Work.wait = wait
