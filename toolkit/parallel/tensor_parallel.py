"""Tensor parallelism: each matrix split over ranks, hidden states between the blocks split by sequence.

A parameter becomes a DTensor over the tp mesh, so that sharding, checkpoints and initial weights know
which part of it a rank has. A module's own forward reads that part as a plain tensor, and what is around it
communicates (Megatron's column, row and sequence parallelism: Korthikanti et al. 2022, arXiv:2205.05198):
hidden states are gathered along the sequence before attention, feed-forward and head, and what rows of a
matrix contribute is summed and scattered along the sequence again. DTensor's own dispatch of each
operation is never paid so. Generation, whose sequences are of one token, keeps them whole: nothing is
gathered, and sums go to all ranks.

Each row of the model's table has a style of :data:`STYLES` for its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from toolkit import compat
from toolkit.compat import CheckpointWrapper
from toolkit.loss import token_losses
from toolkit.parallel.autograd_collectives import all_reduce, gather, reduce_scatter
from toolkit.parallel.vocabulary_parallel import vocabulary_parallel_losses

SEQUENCE = 1
"""The dimension of hidden states (B, S, D) that is split between blocks."""


@dataclass(frozen=True)
class Between:
    """How hidden states between the blocks lie on the ranks of ``group``: each has a piece of the sequence,
    or, without ``split``, all of it."""

    group: dist.ProcessGroup
    split: bool

    def whole(self, x: Tensor) -> Tensor:
        """Put together on every rank what lies between the blocks."""
        return gather(x, SEQUENCE, self.group) if self.split else x

    def summed(self, x: Tensor) -> Tensor:
        """The sum over ranks, as it lies between the blocks."""
        return reduce_scatter(x, SEQUENCE, self.group) if self.split else all_reduce(x, self.group)


def apply_tensor_parallel(
    model: nn.Module,
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    *,
    split_sequence: bool = True,
    loss_parallel: bool = True,
) -> None:
    """Split the modules of ``model``, on the meta device, in place: ``plan`` has styles by name, and a module
    that fine-tuning has added brings its own. Without ``split_sequence`` sequences of any length pass, and no
    gradients. Without ``loss_parallel`` logits are gathered before the loss.

    Raises:
        ValueError: a dimension to be split does not divide by the mesh, or a parameter is in no module of
            the plan, so that no rank would add the others' share of its gradient.
    """
    between = Between(mesh.get_group(), split_sequence)
    for name, module in list(model.named_modules()):
        style = getattr(module, "tensor_style", None) or plan.get(name)
        if style == "head" and not loss_parallel:
            style = "gathered head"
        if style:
            try:
                STYLES[style](module, mesh, between)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None
    missing = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missing:
        raise ValueError(f"the plan of tensor parallelism has no module of {', '.join(missing)}")


def local(weight: Tensor, gradient: Placement | None = None) -> Tensor:
    """This rank's part; ``gradient`` is how its gradient relates to the whole one, where not as the part."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[gradient] if gradient else None)


@dataclass(frozen=True)
class Placed:
    """The ``placement`` of a parameter's DTensor, and that of its gradient where it is another."""

    placement: Placement
    gradient: Placement | None = None


COLUMN = Placed(Shard(0))
ROW = Placed(Shard(1))
WHOLE = Placed(Replicate(), Partial())
"""Each rank has it all, and a share of its gradient."""
_ADDED = {"column": COLUMN, "row": ROW, "whole": WHOLE}


def _place(module: nn.Module, mesh: DeviceMesh, **places: Placed) -> None:
    """Make the parameters of ``module`` DTensors, by name; its forward reads them as this rank's parts."""
    gradients: dict[str, Placement | None] = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = places[name]
        if isinstance(placed.placement, Shard) and parameter.shape[placed.placement.dim] % mesh.size():
            dim, size = placed.placement.dim, parameter.shape[placed.placement.dim]
            raise ValueError(f"{name}: dimension {dim} of size {size} on {mesh.size()} ranks")
        whole = distribute_tensor(parameter.detach(), mesh, [placed.placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        gradients[name] = placed.gradient
    if gradients:
        kind: Any = type(module)
        compat.become(module, _reading_parts(kind, tuple(gradients.items())))
        module.inside = False  # type: ignore[assignment]


@cache  # one class for all layers, to which torch.compile then gives one graph
def _reading_parts(kind: Any, gradients: tuple[tuple[str, Any], ...]) -> type:
    """A subclass of a module's class that keeps its forward, whatever it is, and there reads a parameter as
    this rank's part. Outside they are the DTensors that FSDP and checkpoints know."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch 2.11 changes nothing from within what is checkpointed
            return kind.forward(self, *args, **kwargs)
        self.inside = True
        try:
            return kind.forward(self, *args, **kwargs)
        finally:  # a recomputation may stop in the middle
            self.inside = False

    reads = {name: property(partial(_read, name=name, gradient=gradient)) for name, gradient in gradients}
    return type(kind.__name__, (kind,), {"forward": forward, **reads})


def _read(module: nn.Module, *, name: str, gradient: Placement | None) -> Any:
    parameter = compat.parameter(module, name)
    inside = module.inside or torch.compiler.is_compiling()
    return local(parameter, gradient) if inside and parameter is not None else parameter


def _added(module: nn.Module, style: str) -> dict[str, Placed]:
    """The placements of parameters that fine-tuning has added to ``module``, as it declares them itself."""
    places = getattr(module, "tensor_placements", {}).get(style, {})
    return {name: _ADDED[place] for name, place in places.items()}


def _adapter(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """A module of fine-tuning, which says where its parameters lie."""
    _place(module, mesh, **_added(module, "adapter"))


def _column(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """Output features split: takes whole hidden states, gives this rank's features."""
    _place(module, mesh, weight=COLUMN, bias=COLUMN, **_added(module, "column"))


def _row(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """Input features split: takes this rank's features, gives the sum as it lies between the blocks."""
    _place(module, mesh, weight=ROW, **_added(module, "row"))
    if hasattr(module, "sum_over_ranks"):
        module.sum_over_ranks = partial(all_reduce, group=between.group)  # type: ignore[assignment]
    module.register_forward_hook(lambda module, args, output: between.summed(output))


def _whole(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """Parameters of what reads this rank's shard of the sequence, or of the heads: whole on every rank."""
    _place(module, mesh, **{name: WHOLE for name, _ in module.named_parameters(recurse=False)})


def _gather_input(module: nn.Module, mesh: DeviceMesh, between: Between) -> None:
    """The pieces of the sequence put together once for all that the module does with them."""
    kind: Any = type(module)
    compat.become(module, _of_whole(kind))
    module.between, module.gathers_again = between, False  # type: ignore[assignment]


@cache  # one class for all layers, as above
def _of_whole(kind: Any) -> type:
    """A subclass of a module's class whose forward takes a piece of the sequence and computes with all."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        between: Between = self.between
        if not (self.gathers_again and between.split and torch.is_grad_enabled()):
            return kind.forward(self, between.whole(x), *args, **kwargs)
        if torch.compiler.is_compiling():  # computes again what is marked so, the rest as it sees fit
            return kind.forward(self, checkpoint(between.whole, x, use_reentrant=False), *args, **kwargs)
        gathered = _Gathered(x, between)
        with saved_tensors_hooks(gathered.pack, gathered.unpack):
            # Held until forward ends, which may let go of its argument: another tensor would lie there then.
            whole = gathered.of_forward()
            return kind.forward(self, whole, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def gather_again(blocks: nn.ModuleDict) -> None:
    """Keep of what attention and feed-forward gather this rank's piece alone; backward gathers it again, once
    for all products that need it. A block that is checkpointed does so by itself."""
    for block in blocks.values():
        for module in [] if isinstance(block, CheckpointWrapper) else block.modules():
            if hasattr(module, "gathers_again"):
                module.gathers_again = True  # type: ignore[assignment]


class _Gathered:
    """The pieces of one sequence as a forward has them whole, and a backward again."""

    def __init__(self, piece: Tensor, between: Between):
        self.piece, self.between = piece, between
        self.storage = 0
        self.users = self.served = 0
        self.whole: Tensor | None = None

    def of_forward(self) -> Tensor:
        whole = self.between.whole(self.piece)
        self.piece = self.piece.detach()
        self.storage = id(whole.untyped_storage())  # not the tensor: this stays until the backward
        return whole

    def pack(self, saved: Tensor) -> Any:
        """Keep of the whole, or a view of it, where that lies; of other tensors themselves."""
        if id(saved.untyped_storage()) != self.storage:
            return saved
        self.users += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.whole is None:
            with torch.no_grad():
                self.whole = self.between.whole(self.piece)
        whole = self.whole
        self.served += 1
        if self.served == self.users:
            self.whole, self.served = None, 0
        return whole.as_strided(*kept)


def _embedding(module: Any, mesh: DeviceMesh, between: Between) -> None:
    """Entries split: each rank looks up those that it has, and gets its piece of the sequence."""
    _place(module, mesh, weight=COLUMN)
    first = mesh.get_local_rank() * (module.num_embeddings // mesh.size())
    last = first + module.num_embeddings // mesh.size()
    masks: list[Tensor] = []

    def own(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        [tokens] = args
        mine = (tokens >= first) & (tokens < last)
        masks.append(mine)
        return ((tokens - first) * mine,)

    def add_up(module: nn.Module, args: tuple[Tensor], found: Tensor) -> Tensor:
        return between.summed(found * masks.pop()[..., None])

    module.register_forward_pre_hook(own)
    module.register_forward_hook(add_up)


def _head(module: Any, mesh: DeviceMesh, between: Between, *, gathered: bool = False) -> None:
    """Vocabulary split: logits stay split within the loss, unless ``gathered``, and are gathered where there
    are no labels."""
    group = between.group
    _place(module, mesh, weight=COLUMN)
    module.logits = partial(_all_logits, group=group)
    if gathered:
        module.loss = partial(_gathered_loss, group=group)
    else:
        module.loss = partial(_split_loss, rank=mesh.get_local_rank(), group=group)

    def inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h, labels, tied = (*args, None, None)[:3]
        return between.whole(h), labels, None if tied is None else local(tied)

    module.register_forward_pre_hook(inputs)


def _split_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, rank: int, group: Any) -> Tensor:
    logits_TV = F.linear(h_TD, weight_VD)
    return vocabulary_parallel_losses(logits_TV, labels_T, first=rank * len(weight_VD), group=group)


def _gathered_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, group: Any) -> Tensor:
    return token_losses(_all_logits(h_TD, weight_VD, group=group), labels_T)


def _all_logits(h: Tensor, weight_VD: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """All logits, of which each rank computes the same: its own part's gradient is not summed over ranks."""
    return _Whole.apply(F.linear(h, weight_VD), group)


def _classifier(module: Any, mesh: DeviceMesh, between: Between) -> None:
    """Scores are few: each rank has all of the head, and answers for its piece of the sequence."""
    for part in (module, *module.hidden):
        _place(part, mesh, weight=WHOLE)
    group, rank = between.group, mesh.get_local_rank()

    def own(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h, labels, *others = args
        if labels is not None and between.split:
            labels = labels.chunk(mesh.size(), dim=SEQUENCE)[rank]
        return h, labels, *others

    def together(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.ndim:
            return between.whole(output)
        return all_reduce(output, group) if between.split else output

    module.register_forward_pre_hook(own)
    module.register_forward_hook(together)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.part = x.shape[-1]
        ctx.first = ctx.part * dist.get_rank(group)
        return gather(x, x.ndim - 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.first, ctx.part).contiguous(), None


STYLES: dict[str, Callable[[nn.Module, DeviceMesh, Between], None]] = {
    "column": _column,
    "row": _row,
    "whole": _whole,
    "adapter": _adapter,
    "gather": _gather_input,
    "embedding": _embedding,
    "head": _head,
    "gathered head": partial(_head, gathered=True),
    "classifier": _classifier,
}
