"""Private names of torch, each with the public one that is missing, and stand-ins for Python 3.10.

Import torch's from here, by the names of :data:`PRIVATE`. Each is looked up when it is first asked for, since
some load torch's compiler, and this file serves what must run without torch. ``tests/test_compat.py`` finds
those that stand elsewhere, and sees that each exists.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["file_digest", "tomllib"]  # and what __getattr__ finds

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
    # torch.distributed has no functional collectives, which torch.compile traces
    "functional_collectives": "torch:ops._c10d_functional",
    # torch.distributed.Work tells not what it is the work of
    "work_operation": "torch.distributed:Work._get_op_type",
    # torch.utils.checkpoint wraps functions and no modules
    "ActivationWrapper": f"{_WRAPPER}ActivationWrapper",
    "CheckpointWrapper": f"{_WRAPPER}CheckpointWrapper",
    "checkpoint_wrapper": f"{_WRAPPER}checkpoint_wrapper",
    # torch.utils.checkpoint counts operators that FSDP's hooks run in one of two forwards
    "CachedDispatchMode": "torch.utils.checkpoint:_CachedTorchDispatchMode",
    "operator_is_compiled": "torch.utils.checkpoint:_is_compiling",
    # torch.compile has no such options, nor callbacks, nor its cache's place
    "dynamo_config": "torch._dynamo.config:",
    "functorch_config": "torch._functorch.config:",
    "inductor_config": "torch._inductor.config:",
    "compile_callbacks": "torch._dynamo.callback:",
    "default_cache_dir": "torch._inductor.runtime.cache_dir_utils:default_cache_dir",
    "enable_symm_mem_for_group": "torch.distributed._symmetric_memory:enable_symm_mem_for_group",
    "higher_order_wrap": "torch._higher_order_ops:wrap",
    # torch.compiler has no marks of tensors
    "mark_dynamic": "torch._dynamo:mark_dynamic",
    "mark_static_address": "torch._dynamo:mark_static_address",
    # torch.distributed.tensor tells no rank's shape and offset, and moves what a DTensor is made of
    "DTensorSpec": "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "TensorMeta": "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "local_shape_and_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "shape_and_offset_at": "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
    # DTensor keeps meshes of process groups that are destroyed, and has no way to forget them
    "clear_sharding_cache": "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    # DeviceMesh makes no mesh of fewer or more dimensions of the same ranks
    "flatten_mesh": "torch.distributed.device_mesh:DeviceMesh._flatten",
    "unflatten_mesh": "torch.distributed.device_mesh:DeviceMesh._unflatten",
    # torch.distributed.pipelining takes no schedule from a file
    "ScheduleRuntime": "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime",
    "load_schedule": "torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._load_csv",
    # torch.distributed.checkpoint hides its records of files, which tools that read its folders need
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "StoragePrefix": "torch.distributed.checkpoint.filesystem:_StoragePrefix",
    # torch.optim.Adam gives its kernels DTensors, of which each is dispatched by itself
    "init_adam_group": "torch.optim:Adam._init_group",
    # torch.autograd tells not whether a backward runs, nor torch.distributed a group by its name
    "backward_task": "torch:_C._current_graph_task_id",
    "resolve_process_group": "torch.distributed.distributed_c10d:_resolve_process_group",
    # FSDPModule tells not which parameters are gathered together, and when
    "fsdp_state": "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
    # torch has these operations without a public function
    "foreach_mul_": "torch:_foreach_mul_",
    "foreach_norm": "torch:_foreach_norm",
    "softmax_backward": "torch:_softmax_backward_data",
    "unsafe_view": "torch:ops.aten._unsafe_view",  # a view that autograd does not know for one
    "weight_norm_backward": "torch:ops.aten._weight_norm_interface_backward",
    # scaled_dot_product_attention neither returns nor takes log-sum-exps
    "flash_attention": "torch:ops.aten._scaled_dot_product_flash_attention",
    "flash_attention_backward": "torch:ops.aten._scaled_dot_product_flash_attention_backward",
    "flash_attention_cpu": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "flash_attention_cpu_backward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    # torch multiplies by matrices in oneDNN's layout in compiled code alone
    "reorder_linear_weight": "torch:ops.mkldnn._reorder_linear_weight",
    "linear_of_reordered": "torch:ops.mkldnn._linear_pointwise",
    "onednn_has_bf16": "torch:ops.mkldnn._is_mkldnn_bf16_supported",
    # torch.cuda.memory documents its history and snapshots under private names
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "memory_snapshot": "torch.cuda.memory:_snapshot",
    # torch.cuda warns of no reference cycles
    "warn_tensor_cycles": "torch.utils.viz._cycles:warn_tensor_cycles",
    # torch has neither public tensors without storage nor public dispatch modes
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor:unset_fake_temporarily",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "tree_iter": "torch.utils._pytree:tree_iter",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",  # registers its back end
    "local_scalar": "torch:ops.aten._local_scalar_dense",
}
"""Names in this module, where torch has them, and above them what torch lacks."""


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = PRIVATE[name].partition(":")
    found: Any = import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    return globals().setdefault(name, found)


# Private attributes of tensors, modules and groups; without types, since this file imports no torch


def become(module: Any, kind: type) -> None:
    """Give ``module`` another class, a subclass of its own, as fully_shard and torch.nn.utils.parametrize do:
    no public hook can have a forward read a parameter as something else in what is compiled and checkpointed.
    """
    module.__class__ = kind


def parameter(module: Any, name: str) -> Any:
    """The parameter of a module whose attribute ``name`` is something else."""
    return module._parameters[name]


def checkpointed(wrapper: Any) -> Any:
    """The module within an :class:`ActivationWrapper`."""
    return wrapper._checkpoint_wrapped_module


def local_tensor(tensor: Any) -> Any:
    """The very tensor that a DTensor has of this rank: to_local() is part of autograd, waits for collectives,
    and gives another one of a parameter."""
    return tensor._local_tensor


def dtensor_like(part: Any, other: Any) -> Any:
    """The DTensor laid out as ``other`` of a rank's ``part``, wherever this lies; from_local() would move it
    to the device of the mesh."""
    return type(other)(part, other._spec, requires_grad=False)


def checkpoint_offset(tensor: Any) -> Any:
    """Where the bytes of a tensor lie in the file that torch.load mapped to the meta device."""
    return tensor.untyped_storage()._checkpoint_offset


def fuse_collectives(fuse: bool) -> None:
    """Have inductor fuse matmuls with the collectives of symmetric memory beside them, for this process."""
    __getattr__("inductor_config")._micro_pipeline_tp = fuse


def process_groups() -> list[Any]:
    """All groups of this process; torch.distributed names the default one alone."""
    return list(import_module("torch.distributed").distributed_c10d._world.pg_map)


def gloo_options(device: Any, *, threads: int, timeout: Any) -> Any:
    """Options of a gloo group; new_group() takes none."""
    options = import_module("torch.distributed").ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = [device], threads, timeout
    return options


def recorded_collectives(backend: str) -> dict[str, Any]:
    """The trace of torch's flight recorder of "gloo" or "nccl", which is read from files alone; empty where
    torch was built without that back end."""
    names = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    dump = getattr(import_module("torch._C._distributed_c10d"), names[backend], None)
    return json.loads(dump()) if dump else {}


def fsdp_param_group(module: Any) -> Any:
    """FSDP's record of what is gathered with this module's parameters; None where it has none."""
    return module._get_fsdp_state()._fsdp_param_group


def operator_schema(operator: Any) -> Any:
    """The name, arguments and aliases of one of torch's operators."""
    return operator._schema


def schedule_actions(schedule: Any, ranks: int, stages: int, micro_batches: int) -> list[Any]:
    """The actions of each rank in a pipeline, which torch tells of stages in a process group alone."""
    made = schedule.__new__(schedule)
    made._n_microbatches, made.pp_group_size, made.n_local_stages = micro_batches, ranks, stages // ranks
    made.num_stages = made._num_stages = stages
    made._stages = [None] * (stages // ranks)
    made.number_of_rounds = max(1, micro_batches // ranks)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    return [made._calculate_single_rank_operations(rank) for rank in range(ranks)]


def watch_resizes(note: Callable[[Any], None]) -> Callable[[], None]:
    """Have ``note`` called with each storage that is resized, which is how FSDP frees parameters: no dispatch
    mode sees it, and FSDPModule has no hook. Returns what ends it. For the planner, which runs no data."""
    kind = import_module("torch").UntypedStorage
    resize = kind.resize_

    def resized(storage: Any, size: int) -> Any:
        done = resize(storage, size)
        note(storage)
        return done

    kind.resize_ = resized
    return lambda: setattr(kind, "resize_", resize)


def replace_work_wait(wait: Callable[..., bool]) -> None:
    """Have torch wait by ``wait`` for its collectives and transfers.

    The one patch of torch in a run: FSDP and pipeline schedules call ``Work.wait`` themselves, and torch has
    neither a hook around it nor a way to set the time-out of gloo's transfers after their group was formed.
    """
    import_module("torch.distributed").Work.wait = wait
