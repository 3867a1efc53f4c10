"""Notes the operations of a fake step by the pieces of the model: their FLOPs and bytes, and what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from toolkit.compat import backward_task, operator_schema, resolve_process_group, tree_iter
from toolkit.config import Config
from toolkit.distributed.dtensor import clean_name
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims
from toolkit.planner.allocations import Allocations, fsdp_functions, storing, watched
from toolkit.planner.fake_step import fake_run
from toolkit.planner.memory import gathered_dtype, gathered_numbers
from toolkit.planner.traffic import FUNCTIONAL
from toolkit.planner.work import Collective, Costs, Kind, Operation, Piece, Work

_MODULES = {  # of each piece, and the moment after its forward
    "embedding": (("tok_embeddings",), "forward of layers.0"),
    "first": (("layers.0",), "forward of layers.1"),
    "block": (("layers.1",), "forward of norm"),
    "head": (("norm", "output"), "backward of output"),
}
_PIECES = {module: piece for piece, (modules, _) in _MODULES.items() for module in modules}
_ACTIVATIONS = ("activations", "work of backward")


@dataclass
class _Noted:
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
    """Operations one after the other that a compiler fuses."""

    def __init__(self) -> None:
        self.read: dict[int, int] = {}
        self.made: set[int] = set()
        self.last = 0

    def add(self, inputs: dict[int, int], outputs: dict[int, int]) -> None:
        """Add what reads and writes these storages, so many bytes of each."""
        for storage, size in inputs.items():
            if storage not in self.made:
                self.read[storage] = max(self.read.get(storage, 0), size)
        self.made.update(outputs)
        self.last = sum(outputs.values())


class Operations(Allocations):
    """Notes operations beside storages; ``dims`` names the dimension of a group by its number of ranks and
    the distance between them."""

    def __init__(self, held: dict[str, Iterable[Tensor]], dims: dict[tuple[int, int], str]):
        self.noted: dict[tuple[str, str], _Noted] = {}
        self.began: list[tuple[str, int]] = []  # moments, and bytes of activations that live then
        self._dims = dims
        self._chain: tuple[tuple[str, str], _Chain] | None = None
        self._under_way: tuple[tuple[str, str], tuple[str, str, float]] | None = None
        super().__init__(held)

    @property
    def moment(self) -> str:
        return self._moment

    @moment.setter
    def moment(self, moment: str) -> None:
        self._moment = moment
        self.began.append((moment, self.living(_ACTIVATIONS)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        name = operator_schema(function).name.partition("::")[2]
        if function.namespace in ("c10d", "fsdp", "prim") or name.startswith(("empty", "new_empty")):
            return result
        where = self._where()
        if function.namespace == "_c10d_functional":
            self._send(name, args, result, where)
            return result
        inputs = [it for it in tree_iter((args, kwargs or {})) if isinstance(it, Tensor)]
        if operator_schema(function).is_mutable:
            outputs = _written(function, args, kwargs or {})
        else:
            outputs = [it for it in tree_iter(result) if isinstance(it, Tensor)]
            if _aliases(inputs, outputs):
                return result
        if not outputs or any(fsdp_functions()):
            return result
        self._end_collective(waits=False)
        kind, flops = _flops(function, name, args, kwargs or {}, result)
        size = 2.0 * sum(map(_bytes, outputs)) if name == "embedding" else sum(map(_bytes, inputs + outputs))
        self._at(where).operations[kind, flops, float(size)] += 1
        if kind in ("matmul", "attention"):
            self._end_chain()
        else:
            if self._chain is None or self._chain[0] != where:
                self._end_chain()
                self._chain = (where, _Chain())
            self._chain[1].add(self._storages([] if name == "embedding" else inputs), self._storages(outputs))
        return result

    def done(self, piece: str, phase: str) -> Work:
        self._end_chain()
        return self._at((piece, phase)).work()

    def _storages(self, tensors: list[Tensor]) -> dict[int, int]:
        held = [(storing(it), _bytes(it)) for it in tensors]
        return {self._sizes.get(id(it.untyped_storage()), (-1, 0))[0]: size for it, size in held}

    def _at(self, where: tuple[str, str]) -> _Noted:
        return self.noted.setdefault(where, _Noted())

    def _where(self) -> tuple[str, str]:
        if self._moment == "update":
            return "update", "update"
        piece = _PIECES.get(self._moment.rpartition(" of ")[2], "start")
        if backward_task() == -1:
            return piece, "forward"
        # Checkpointing computes again with gradients, which a backward has not.
        return piece, "again" if torch.is_grad_enabled() else "backward"

    def _send(self, name: str, args: Any, result: Any, where: tuple[str, str]) -> None:
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
            whole = result if place is None else args[place]
            self._under_way = (where, (dimension, operation, float(_bytes(whole))))

    def _end_collective(self, *, waits: bool) -> None:
        if self._under_way:
            where, collective = self._under_way
            self._at(where).collectives[collective + (waits,)] += 1
            self._under_way = None

    def _end_chain(self) -> None:
        if self._chain:
            where, chain = self._chain
            self._at(where).chains.append(float(sum(chain.read.values()) + chain.last))
            self._chain = None


def found_costs(config: Config, args: ModelArgs, layout: ParallelDims, param_dtype: torch.dtype) -> Costs:
    """Run a step of a model of two blocks and note what each piece costs."""
    dims = {(layout.cp, layout.tp): "cp", (layout.tp, 1): "tp"}
    made: list[Operations] = []

    def noting(held: dict[str, Iterable[Tensor]]) -> Allocations:
        made.append(Operations(held, dims))
        return made[0]

    # Without balancing the last piece of a sequence sees most.
    rank = 0 if config.parallelism.context_parallel_load_balancer else (layout.cp - 1) * layout.tp
    with fake_run(config, args, layout, rank, param_dtype=param_dtype, target="cuda") as run:
        [model] = run.model_parts.models
        with watched([model], run.optimizer, run.state, noting):
            run.passes()
            run.optimizer.step()
        [noted] = made
        most = noted.most(_ACTIVATIONS)
        pieces = {
            piece: _piece(model, noted, piece, modules, following, most, param_dtype)
            for piece, (modules, following) in _MODULES.items()
        }
        updated = sum(gathered_numbers(it) // layout.cp for it in model.parameters() if it.requires_grad)
        return Costs(**pieces, update=noted.done("update", "update"), updated=updated)


def _piece(
    model: nn.Module,
    noted: Operations,
    piece: str,
    modules: tuple[str, ...],
    following: str,
    most: dict[str, int],
    dtype: torch.dtype,
) -> Piece:
    held = [
        it
        for name, it in model.named_parameters()
        if clean_name(name).startswith(tuple(f"{module}." for module in modules))
    ]
    began = dict(noted.began)  # of a forward the last one: before it may be that of a reference

    def transient(direction: str) -> int:
        moments = [f"{direction} of {module}" for module in modules]
        return max((most[it] - began[it] for it in moments if it in most), default=0)

    before, after = began[f"forward of {modules[0]}"], began[following]
    return Piece(
        forward=noted.done(piece, "forward"),
        backward=noted.done(piece, "backward"),
        again=noted.done(piece, "again"),
        numbers=sum(map(gathered_numbers, held)),
        gathered_bytes=sum(gathered_numbers(it) * gathered_dtype(it, dtype).itemsize for it in held),
        trained=sum(gathered_numbers(it) for it in held if it.requires_grad),
        saved_bytes=max(0, after - before),
        forward_bytes=transient("forward"),
        backward_bytes=transient("backward"),
    )


def _bytes(tensor: Tensor) -> int:
    tensor = storing(tensor)
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def _aliases(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    known = {id(tensor.untyped_storage()) for tensor in inputs}
    return all(id(tensor.untyped_storage()) in known for tensor in outputs)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes to."""
    given = zip(operator_schema(function).arguments, args, strict=False)
    named = [(it, kwargs.get(it.name)) for it in operator_schema(function).arguments[len(args) :]]
    written = [value for it, value in [*given, *named] if it.alias_info and it.alias_info.is_write]
    return [it for it in tree_iter(written) if isinstance(it, Tensor)]


def _flops(function: Any, name: str, args: Any, kwargs: Any, result: Any) -> tuple[Kind, float]:
    if "attention" in name:
        backward = name.endswith("backward")
        query, key = args[1 if backward else 0], args[2 if backward else 1]
        (batch, heads, queries, width), keys = query.shape, key.shape[2]
        # Causal: the last query sees all keys. Backward is five products, of which two are the forward's.
        seen = queries * (keys - queries / 2)
        return "attention", (10 if backward else 4) * batch * heads * width * seen
    if name.startswith("nf4_linear"):
        return "matmul", 2.0 * args[0].numel() * result.shape[-1]
    count = flop_registry.get(function.overloadpacket)
    if count is None:
        return "other", 0.0
    return "matmul", float(count(*args, **kwargs, out_val=result))
