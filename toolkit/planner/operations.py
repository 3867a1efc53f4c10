"""Record FLOPs, bytes and communication of the operations in a fake step, by part of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from toolkit.compat import backward_task, operator_schema, resolve_process_group, tree_iter
from toolkit.config import Config
from toolkit.distributed.dtensor import clean_name, local
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims
from toolkit.planner.allocations import Allocations, fsdp_functions, storage_tensor, track_memory
from toolkit.planner.fake_step import fake_run
from toolkit.planner.memory import gathered_dtype, gathered_elements
from toolkit.planner.traffic import FUNCTIONAL, is_of_experts
from toolkit.planner.work import Collective, Costs, Kind, ModuleCost, Operation, Sizes, Work

_MODULES = {  # modules of each part, and the moment after their forward
    "embedding": (("tok_embeddings",), "forward of layers.0"),
    "first": (("layers.0",), "forward of layers.1"),
    "block": (("layers.1",), "forward of norm"),
    "head": (("norm", "output"), "backward of output"),
}
_PART_OF_MODULE = {module: part for part, (modules, _) in _MODULES.items() for module in modules}
_ACTIVATIONS = ("activations", "work of backward")


@dataclass
class _Record:
    operations: Counter[tuple[Kind, float, float]] = field(default_factory=Counter)
    collectives: Counter[tuple[str, str, float, bool]] = field(default_factory=Counter)
    chains: list[float] = field(default_factory=list)

    def work(self) -> Work:
        return Work(
            tuple(Operation(*key, count) for key, count in self.operations.items()),
            tuple(Collective(*key, count) for key, count in self.collectives.items()),
            tuple(self.chains),
        )


class _Chain:
    """Consecutive operations that a compiler can fuse."""

    def __init__(self) -> None:
        self.read: dict[int, int] = {}
        self.written: set[int] = set()
        self.last = 0

    def add(self, inputs: dict[int, int], outputs: dict[int, int]) -> None:
        """Add an operation, given the bytes that it reads and writes in each storage."""
        for storage, size in inputs.items():
            if storage not in self.written:
                self.read[storage] = max(self.read.get(storage, 0), size)
        self.written.update(outputs)
        self.last = sum(outputs.values())


class Operations(Allocations):
    """Records operations in addition to storages. ``dims`` maps (size, stride) of a group to its mesh
    dimension."""

    def __init__(self, existing: dict[str, Iterable[Tensor]], dims: dict[tuple[int, int], str]):
        self.records: dict[tuple[str, str], _Record] = {}
        self.starts: list[tuple[str, int]] = []  # moments, and the bytes of activations at their start
        self._dims = dims
        self._chain: tuple[tuple[str, str], _Chain] | None = None
        self._pending: tuple[tuple[str, str], tuple[str, str, float]] | None = None
        super().__init__(existing)

    @property
    def moment(self) -> str:
        return self._moment

    @moment.setter
    def moment(self, moment: str) -> None:
        self._moment = moment
        self.starts.append((moment, self.live_bytes(_ACTIVATIONS)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        name = operator_schema(function).name.partition("::")[2]
        if function.namespace in ("c10d", "fsdp", "prim") or name.startswith(("empty", "new_empty")):
            return result
        phase = self._phase()
        if function.namespace == "_c10d_functional":
            self._send(name, args, result, phase)
            return result
        inputs = [it for it in tree_iter((args, kwargs or {})) if isinstance(it, Tensor)]
        if operator_schema(function).is_mutable:
            outputs = _outputs_of_mutation(function, args, kwargs or {})
        else:
            outputs = [it for it in tree_iter(result) if isinstance(it, Tensor)]
            if _aliases(inputs, outputs):
                return result
        if not outputs or any(fsdp_functions()):
            return result
        self._end_collective(waits=False)
        kind, flops = _flops(function, name, args, kwargs or {}, result)
        size = 2.0 * sum(map(_bytes, outputs)) if name == "embedding" else sum(map(_bytes, inputs + outputs))
        self._record(phase).operations[kind, flops, float(size)] += 1
        if kind in ("matmul", "attention"):
            self._end_chain()
        else:
            if self._chain is None or self._chain[0] != phase:
                self._end_chain()
                self._chain = (phase, _Chain())
            self._chain[1].add(self._storages([] if name == "embedding" else inputs), self._storages(outputs))
        return result

    def work_of(self, part: str, phase: str) -> Work:
        self._end_chain()
        return self._record((part, phase)).work()

    def _storages(self, tensors: list[Tensor]) -> dict[int, int]:
        sizes = [(storage_tensor(it), _bytes(it)) for it in tensors]
        return {self._sizes.get(id(it.untyped_storage()), (-1, 0))[0]: size for it, size in sizes}

    def _record(self, phase: tuple[str, str]) -> _Record:
        return self.records.setdefault(phase, _Record())

    def _phase(self) -> tuple[str, str]:
        if self._moment == "update":
            return "update", "update"
        part = _PART_OF_MODULE.get(self._moment.rpartition(" of ")[2], "start")
        if backward_task() == -1:
            return part, "forward"
        # Unlike backward, recomputation runs with gradients enabled.
        return part, "recompute" if torch.is_grad_enabled() else "backward"

    def _send(self, name: str, args: Any, result: Any, phase: tuple[str, str]) -> None:
        if name == "wait_tensor":
            return self._end_collective(waits=True)
        if name not in FUNCTIONAL:
            return
        self._end_chain()
        self._end_collective(waits=False)
        operation, place = FUNCTIONAL[name]
        ranks = dist.get_process_group_ranks(resolve_process_group(args[-1]))
        if len(ranks) > 1:
            dimension = self._dims.get((len(ranks), ranks[1] - ranks[0]), "world")
            if is_of_experts(name, args):
                dimension, operation = "ep", "all_to_all"
            whole = result if place is None else args[place]
            self._pending = (phase, (dimension, operation, float(_bytes(whole))))

    def _end_collective(self, *, waits: bool) -> None:
        if self._pending:
            phase, collective = self._pending
            self._record(phase).collectives[collective + (waits,)] += 1
            self._pending = None

    def _end_chain(self) -> None:
        if self._chain:
            phase, chain = self._chain
            self._record(phase).chains.append(float(sum(chain.read.values()) + chain.last))
            self._chain = None


def measure_costs(config: Config, args: ModelArgs, layout: ParallelDims, param_dtype: torch.dtype) -> Costs:
    """Measure the costs of each part in a step of a model with two blocks."""
    dims = {(layout.cp, layout.tp): "cp", (layout.tp, 1): "tp"}
    trackers: list[Operations] = []

    def make_tracker(existing: dict[str, Iterable[Tensor]]) -> Allocations:
        trackers.append(Operations(existing, dims))
        return trackers[0]

    # Without load balancing, the last shard of a sequence attends to the most keys.
    rank = 0 if config.parallelism.context_parallel_load_balancer else (layout.cp - 1) * layout.tp
    with fake_run(config, args, layout, rank, param_dtype=param_dtype, target="cuda") as run:
        [model] = run.model_parts.models
        with track_memory([model], run.optimizer, run.state, make_tracker):
            run.passes()
            if config.activation_checkpoint.mode == "none":  # otherwise only the blocks are used
                run.optimizer.step()
        [tracker] = trackers
        peaks = tracker.peaks(_ACTIVATIONS)
        parts = {
            part: _module_cost(model, tracker, part, modules, following, peaks, param_dtype)
            for part, (modules, following) in _MODULES.items()
        }
        updated = sum(local(it).numel() for it in model.parameters() if it.requires_grad)
        return Costs(**parts, update=tracker.work_of("update", "update"), updated=updated)


def _module_cost(
    model: nn.Module,
    tracker: Operations,
    part: str,
    modules: tuple[str, ...],
    following: str,
    peaks: dict[str, int],
    dtype: torch.dtype,
) -> ModuleCost:
    parameters = [
        it
        for name, it in model.named_parameters()
        if clean_name(name).startswith(tuple(f"{module}." for module in modules))
    ]
    experts = [it for it in parameters if _is_sharded_over_ep(it)]
    starts = dict(tracker.starts)  # keeps the last forward; an earlier one may be DPO's reference

    def transient(direction: str) -> int:
        moments = [f"{direction} of {module}" for module in modules]
        return max((peaks[it] - starts[it] for it in moments if it in peaks), default=0)

    before, after = starts[f"forward of {modules[0]}"], starts[following]
    return ModuleCost(
        forward=tracker.work_of(part, "forward"),
        backward=tracker.work_of(part, "backward"),
        recompute=tracker.work_of(part, "recompute"),
        **vars(_sizes(parameters, dtype)),
        experts=_sizes(experts, dtype),
        saved_bytes=max(0, after - before),
        forward_bytes=transient("forward"),
        backward_bytes=transient("backward"),
    )


def _is_sharded_over_ep(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _sizes(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> Sizes:
    return Sizes(
        elements=sum(map(gathered_elements, parameters)),
        gathered_bytes=sum(gathered_elements(it) * gathered_dtype(it, dtype).itemsize for it in parameters),
        trained=sum(gathered_elements(it) for it in parameters if it.requires_grad),
    )


def _bytes(tensor: Tensor) -> int:
    tensor = storage_tensor(tensor)
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _aliases(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    known = {id(tensor.untyped_storage()) for tensor in inputs}
    return all(id(tensor.untyped_storage()) in known for tensor in outputs)


def _outputs_of_mutation(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    positional = zip(operator_schema(function).arguments, args, strict=False)
    by_name = [(it, kwargs.get(it.name)) for it in operator_schema(function).arguments[len(args) :]]
    written = [value for it, value in [*positional, *by_name] if it.alias_info and it.alias_info.is_write]
    return [it for it in tree_iter(written) if isinstance(it, Tensor)]


def _flops(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[Kind, float]:
    if "attention" in name:
        backward = name.endswith("backward")
        query, key = args[1 if backward else 0], args[2 if backward else 1]
        if name.startswith("blockwise"):  # (B, S, H, E) instead of (B, H, S, E)
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        (batch, heads, queries, width), keys = query.shape, key.shape[2]
        # Causal: the last query sees all keys. Backward has five matmuls, two of them shared with forward.
        seen = queries * (keys - queries / 2)
        return "attention", (10 if backward else 4) * batch * heads * width * seen
    if name.startswith(("nf4_linear", "onednn_linear")):
        return "matmul", 2.0 * args[0].numel() * result.shape[-1]
    if name.startswith("grouped_linear"):  # and grouped_linear_weight_grad
        return "matmul", 2.0 * args[0].numel() * args[1].shape[1]
    count = flop_registry.get(function.overloadpacket)
    if count is None:
        return "other", 0.0
    return "matmul", float(count(*args, **kwargs, out_val=result))
