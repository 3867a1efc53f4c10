"""Count the communication of a rank in the collectives and transfers of a fake step.

Bytes per step, excluding validation, measured on full tensors: the output of an all-gather, the input of a
reduce-scatter, all-reduce or all-to-all, and the tensor of a transfer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.compat import TorchDispatchMode, clear_sharding_cache, operator_schema, resolve_process_group
from toolkit.config import Config
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims
from toolkit.planner.allocations import fsdp_functions
from toolkit.planner.fake_step import fake_run
from toolkit.planner.layouts import samples

WORLD = "world"
_OF_EXPERTS = "all_to_all of experts"

# Operation, and the index of the full tensor among the arguments; None means the result.
_C10D: dict[str, tuple[str, int]] = {
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
}
FUNCTIONAL: dict[str, tuple[str, int | None]] = {
    "all_gather_into_tensor": ("all_gather", None),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_to_all_single": ("send", 0),
}


def is_of_experts(name: str, args: Any) -> bool:
    """Report whether the functional collective ``name`` is an all-to-all of expert parallelism, which sends
    to several ranks. Ring attention's sends to one rank, but both may use groups of the same ranks."""
    return name == "all_to_all_single" and sum(map(bool, args[1])) > 1


@dataclass(frozen=True)
class Exchange:
    """Communication of ``bytes`` (of full tensors) by ``operation`` ("all_gather", "reduce_scatter",
    "all_reduce", "all_to_all", "send") over the ``ranks`` of ``dimension``."""

    dimension: str
    operation: str
    ranks: tuple[int, ...]
    bytes: int

    @property
    def sent_bytes(self) -> float:
        """Return the bytes that each rank sends, assuming ring collectives."""
        turn = (len(self.ranks) - 1) / len(self.ranks)
        return self.bytes * {"send": 1.0, "all_reduce": 2 * turn}.get(self.operation, turn)


class _Traffic(TorchDispatchMode):
    """Counts communication inside its context, by dimension, operation and ranks."""

    def __init__(self, layout: ParallelDims):
        super().__init__()
        self.bytes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        self._shards = "dp_shard × cp" if layout.cp > 1 else "dp_shard"
        stride, self._dims = 1, dict[tuple[int, int], str]()
        for name in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
            self._dims.setdefault((getattr(layout, name), stride), name)
            stride *= getattr(layout, name)
        self._dims.setdefault((layout.dp_shard * layout.cp, layout.tp), self._shards)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = operator_schema(func).name.partition("::")[2]
        if func.namespace == "c10d" and name in _C10D:
            operation, place = _C10D[name]
            whole = args[place] if isinstance(args[place], Tensor) else args[place][0]
            [boxed, *_] = [each for each in args if isinstance(each, torch.ScriptObject)]
            self._add(operation, dist.ProcessGroup.unbox(boxed), whole, functional=False)
        elif func.namespace == "_c10d_functional" and name in FUNCTIONAL:
            operation, where = FUNCTIONAL[name]
            group = resolve_process_group(args[-1])
            if is_of_experts(name, args):
                operation = _OF_EXPERTS
            self._add(operation, group, result if where is None else args[where], functional=True)
        return result

    def _add(self, operation: str, group: dist.ProcessGroup, whole: Tensor, *, functional: bool) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        # A schedule's first transfers set up connections between neighbors with a single element.
        if len(ranks) == 1 or (operation == "send" and whole.numel() == 1):
            return
        if operation == _OF_EXPERTS:
            dimension, operation = "ep", "all_to_all"
        elif functional:
            dimension = self._dims.get((len(ranks), ranks[1] - ranks[0]), WORLD)
        elif operation == "send":
            dimension = "pp"
        elif operation == "all_to_all":  # among Muon's owners
            dimension = self._shards
        elif any(fsdp_functions()):
            dimension = "dp_replicate" if operation == "all_reduce" else self._shards
        else:
            dimension = WORLD
        self.bytes[dimension, operation, ranks] += whole.nbytes


def step_traffic(
    config: Config,
    args: ModelArgs,
    layout: ParallelDims,
    rank: int,
    *,
    param_dtype: torch.dtype,
    target: str = "cpu",
) -> list[Exchange]:
    """Count the communication of ``rank`` in a step of a run that passed the preflight.

    Large numbers of micro-batches are extrapolated from two fake steps with few. Call this without a process
    group.
    """

    def counted(count: int) -> Counter[tuple[str, str, tuple[int, ...]]]:
        clear_sharding_cache()  # it contains groups of an earlier fake world
        with (
            fake_run(config, args, layout, rank, param_dtype=param_dtype, target=target, count=count) as run,
            _Traffic(layout) as traffic,
        ):
            run.step()
        return traffic.bytes

    _, count = samples(config, layout)
    fewest = max(1, layout.pp)
    if count <= 3 * fewest or config.parallelism.pipeline_parallel_schedule_csv:
        total = counted(count)
    else:
        few, total = counted(2 * fewest), counted(3 * fewest)
        for key in total:
            total[key] += (total[key] - few[key]) // fewest * (count - 3 * fewest)
    return [Exchange(*key, size) for key, size in total.items() if size]
