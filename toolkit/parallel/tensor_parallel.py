"""Tensor parallelism: weight matrices are sharded over ranks, and hidden states between blocks by sequence.

A parameter becomes a DTensor over the tp mesh, so that FSDP, checkpoints and initialization know which shard
a rank has. The forward of its module reads the local shard as a plain tensor, and hooks around it communicate
(Megatron's column, row and sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198): hidden states
are gathered along the sequence before attention, feed-forward and head, and the outputs of row-wise layers
are reduce-scattered along the sequence. This avoids the cost of DTensor's dispatch in every operator.
Generation decodes one token at a time, so sequences are not split: outputs are all-reduced instead.

Each row of a family's parameter table assigns a style of :data:`STYLES` to its module.
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
"""Dimension of the hidden states (B, S, D) that is sharded between blocks."""


@dataclass(frozen=True)
class HiddenLayout:
    """Layout of hidden states between blocks on the ranks of ``group``: sharded along the sequence, or
    replicated if ``split`` is False."""

    group: dist.ProcessGroup
    split: bool

    def gather(self, x: Tensor) -> Tensor:
        """Return the full sequences from hidden states in this layout."""
        return gather(x, SEQUENCE, self.group) if self.split else x

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over ranks, in this layout."""
        return reduce_scatter(x, SEQUENCE, self.group) if self.split else all_reduce(x, self.group)


def apply_tensor_parallel(
    model: nn.Module,
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    *,
    expert_mesh: DeviceMesh | None = None,
    split_sequence: bool = True,
    loss_parallel: bool = True,
) -> None:
    """Shard the modules of ``model``, on the meta device, in place.

    ``plan`` has styles by module name; modules added by fine-tuning have their own style. Experts are divided
    over the first dimension of ``expert_mesh``, if given, and their width over the second. Without
    ``split_sequence``, sequences may have any length, but backward is not supported. Without
    ``loss_parallel``, logits are gathered before the loss.

    Raises:
        ValueError: a sharded dimension is not divisible by the mesh size, or a parameter's module is not in
            the plan, so that its gradient would not be reduced.
    """
    layout = HiddenLayout(mesh.get_group(), split_sequence)
    for name, module in list(model.named_modules()):
        style = getattr(module, "tensor_style", None) or plan.get(name)
        if style == "head" and not loss_parallel:
            style = "gathered head"
        if style:
            try:
                STYLES[style](module, expert_mesh if expert_mesh and style == "experts" else mesh, layout)
            except ValueError as error:
                raise ValueError(f"{name}.{error}") from None
    missing = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if missing:
        raise ValueError(f"the tensor-parallel plan has no module of {', '.join(missing)}")


def local_shard(weight: Tensor, gradient: Placement | None = None) -> Tensor:
    """Return this rank's shard of ``weight``, differentiably. ``gradient`` is the placement of its gradient,
    by default the placement of ``weight``; it applies to the last mesh dimension."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[*weight.placements[:-1], gradient] if gradient else None)


@dataclass(frozen=True)
class ParameterPlacement:
    """DTensor placement of a parameter, and of its gradient if it differs. If ``divided``, forward divides it
    by the number of ranks, so that the sum over ranks contains it once."""

    placement: Placement
    gradient: Placement | None = None
    divided: bool = False


COLUMN = ParameterPlacement(Shard(0))
ROW = ParameterPlacement(Shard(1))
LAST = ParameterPlacement(Shard(2))
REPLICATED = ParameterPlacement(Replicate(), Partial())
"""Placement of a replicated parameter whose gradient is a partial sum on each rank."""
ADDED_ONCE = ParameterPlacement(Replicate(), Partial(), divided=True)
"""Placement of a bias that is added before the sum over ranks."""
_PLACEMENTS = {"column": COLUMN, "row": ROW, "last": LAST, "whole": REPLICATED}


def distribute_parameters(module: nn.Module, mesh: DeviceMesh, **placements: ParameterPlacement) -> None:
    """Convert the named parameters of ``module`` to DTensors; its forward reads them as local shards. If
    ``mesh`` is 2-D, its first dimension divides experts, and the placements apply to the second."""
    read: dict[str, ParameterPlacement] = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        on_mesh = [*[Shard(0)] * (mesh.ndim - 1), placements[name].placement]
        for it, ranks in zip(on_mesh, mesh.shape, strict=True):
            if isinstance(it, Shard) and (size := parameter.shape[it.dim]) % ranks:
                raise ValueError(f"{name}: dimension {it.dim} of size {size} on {ranks} ranks")
        distributed = distribute_tensor(parameter.detach(), mesh, on_mesh, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, requires_grad=parameter.requires_grad))
        read[name] = placements[name]
    if read:
        kind: Any = type(module)
        compat.become(module, _local_view_class(kind, tuple(read.items())))
        module.inside = False  # type: ignore[assignment]


@cache  # one class for all layers, so that they share one graph of torch.compile
def _local_view_class(kind: Any, placements: tuple[tuple[str, ParameterPlacement], ...]) -> type:
    """Return a subclass of ``kind`` whose parameters are local shards inside forward, and DTensors outside,
    for FSDP and checkpoints."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch 2.11 cannot mutate attributes inside a checkpointed region
            return kind.forward(self, *args, **kwargs)
        self.inside = True
        try:
            return kind.forward(self, *args, **kwargs)
        finally:  # a recomputation may stop in the middle
            self.inside = False

    reads = {name: property(partial(_read, name=name, placement=it)) for name, it in placements}
    return type(kind.__name__, (kind,), {"forward": forward, **reads})


def _read(module: nn.Module, *, name: str, placement: ParameterPlacement) -> Any:
    parameter = compat.parameter(module, name)
    inside = module.inside or torch.compiler.is_compiling()
    if not inside or parameter is None:
        return parameter
    local = local_shard(parameter, placement.gradient)
    return local / parameter.device_mesh.shape[-1] if placement.divided else local


def _distribute(
    module: nn.Module, mesh: DeviceMesh, layout: HiddenLayout, *, style: str, **own: ParameterPlacement
) -> None:
    """Distribute a module's ``own`` parameters, and those added by fine-tuning with the placements that the
    module declares for ``style``."""
    declared = getattr(module, "tensor_placements", {}).get(style, {})
    added = {name: _PLACEMENTS[placement] for name, placement in declared.items()}
    distribute_parameters(module, mesh, **own, **added)


def _row(module: nn.Module, mesh: DeviceMesh, layout: HiddenLayout) -> None:
    """Shard input features: the module takes this rank's features and returns their sum, in ``layout``."""
    _distribute(module, mesh, layout, style="row", weight=ROW, bias=ADDED_ONCE)
    if hasattr(module, "sum_over_ranks"):
        module.sum_over_ranks = partial(all_reduce, group=layout.group)  # type: ignore[assignment]
    module.register_forward_hook(lambda module, args, output: layout.reduce(output))


def _moe(module: Any, mesh: DeviceMesh, layout: HiddenLayout) -> None:
    """Route full hidden states on every rank, and sum the experts' outputs over ranks, in ``layout``."""
    module.layout, module.counted = layout, 1 / mesh.size()


def _replicate(module: nn.Module, mesh: DeviceMesh, layout: HiddenLayout) -> None:
    """Replicate the parameters of a module that computes on this rank's shard of the sequence or the
    heads."""
    distribute_parameters(
        module, mesh, **{name: REPLICATED for name, _ in module.named_parameters(recurse=False)}
    )


def _gather_input(module: nn.Module, mesh: DeviceMesh, layout: HiddenLayout) -> None:
    """Gather the module's input along the sequence once, for all its layers."""
    kind: Any = type(module)
    compat.become(module, _gather_input_class(kind))
    module.layout, module.recompute_gather = layout, False  # type: ignore[assignment]


@cache  # one class for all layers, as above
def _gather_input_class(kind: Any) -> type:
    """Return a subclass of ``kind`` whose forward gathers its input along the sequence."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        layout: HiddenLayout = self.layout
        if not (self.recompute_gather and layout.split and torch.is_grad_enabled()):
            return kind.forward(self, layout.gather(x), *args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler recomputes marked operators and decides on the rest
            return kind.forward(self, checkpoint(layout.gather, x, use_reentrant=False), *args, **kwargs)
        gathered = _RegatheredInput(x, layout)
        with saved_tensors_hooks(gathered.pack, gathered.unpack):
            # Kept alive until forward ends, so that no other tensor gets its storage's id.
            full = gathered.gather_forward()
            return kind.forward(self, full, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def recompute_gathers(blocks: nn.ModuleDict) -> None:
    """Save only the local shard of the gathered inputs of attention and feed-forward. Backward gathers each
    input again, once for all matmuls that read it; a checkpointed block does this anyway."""
    for block in blocks.values():
        for module in [] if isinstance(block, CheckpointWrapper) else block.modules():
            if hasattr(module, "recompute_gather"):
                module.recompute_gather = True  # type: ignore[assignment]


class _RegatheredInput:
    """An input that is gathered in forward and again in backward, instead of being saved."""

    def __init__(self, shard: Tensor, layout: HiddenLayout):
        self.shard, self.layout = shard, layout
        self.storage = 0
        self.users = self.served = 0
        self.full: Tensor | None = None

    def gather_forward(self) -> Tensor:
        full = self.layout.gather(self.shard)
        self.shard = self.shard.detach()
        self.storage = id(full.untyped_storage())  # not the tensor, which would stay alive until backward
        return full

    def pack(self, saved: Tensor) -> Any:
        """Save only the geometry of the gathered tensor or of its view; save other tensors unchanged."""
        if id(saved.untyped_storage()) != self.storage:
            return saved
        self.users += 1
        return saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.full is None:
            with torch.no_grad():
                self.full = self.layout.gather(self.shard)
        full = self.full
        self.served += 1
        if self.served == self.users:
            self.full, self.served = None, 0
        return full.as_strided(*packed)


def _embedding(module: Any, mesh: DeviceMesh, layout: HiddenLayout) -> None:
    """Shard the vocabulary: each rank looks up the tokens in its shard, and the results are summed over ranks
    into ``layout``."""
    _distribute(module, mesh, layout, style="embedding", weight=COLUMN)
    first = module.first = mesh.get_local_rank() * (module.num_embeddings // mesh.size())
    last = first + module.num_embeddings // mesh.size()
    masks: list[Tensor] = []

    def mask_tokens(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        [tokens] = args
        mask = (tokens >= first) & (tokens < last)
        masks.append(mask)
        return ((tokens - first) * mask,)

    def reduce_output(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        return layout.reduce(output * masks.pop()[..., None])

    module.register_forward_pre_hook(mask_tokens)
    module.register_forward_hook(reduce_output)


def _head(module: Any, mesh: DeviceMesh, layout: HiddenLayout, *, gathered: bool = False) -> None:
    """Shard the vocabulary. The loss is computed on sharded logits unless ``gathered``; without labels,
    logits are gathered."""
    group = layout.group
    _distribute(module, mesh, layout, style="head", weight=COLUMN)
    module.logits = partial(_gather_logits, group=group)
    if gathered:
        module.loss = partial(_gathered_loss, group=group)
    else:
        module.loss = partial(_parallel_loss, rank=mesh.get_local_rank(), group=group)

    def prepare_inputs(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h, labels, tied = (*args, None, None)[:3]
        return layout.gather(h), labels, None if tied is None else local_shard(tied)

    # Before hooks that fine-tuning has registered, which then change this rank's shard of the weight.
    module.register_forward_pre_hook(prepare_inputs, prepend=True)


def _parallel_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, rank: int, group: Any) -> Tensor:
    logits_TV = F.linear(h_TD, weight_VD)
    return vocabulary_parallel_losses(logits_TV, labels_T, first=rank * len(weight_VD), group=group)


def _gathered_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, group: Any) -> Tensor:
    return token_losses(_gather_logits(h_TD, weight_VD, group=group), labels_T)


def _gather_logits(h: Tensor, weight_VD: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Compute and gather logits. All ranks use them identically, so gradients are not reduced."""
    return _GatherLogits.apply(F.linear(h, weight_VD), group)


def _classifier(module: Any, mesh: DeviceMesh, layout: HiddenLayout) -> None:
    """Replicate the head, which is small: each rank scores its shard of the sequence."""
    for layer in (module, *module.hidden):
        distribute_parameters(layer, mesh, weight=REPLICATED)
    group, rank = layout.group, mesh.get_local_rank()

    def shard_labels(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        h, labels, *others = args
        if labels is not None and layout.split:
            labels = labels.chunk(mesh.size(), dim=SEQUENCE)[rank]
        return h, labels, *others

    def combine(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        if output.ndim and layout.split and args[1] is not None:  # scores, of which each rank uses all
            return _GatherLogits.apply(output.mT, group).mT.clone()
        if output.ndim:
            return layout.gather(output)
        return all_reduce(output, group) if layout.split else output

    module.register_forward_pre_hook(shard_labels)
    module.register_forward_hook(combine)


class _GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size = x.shape[-1]
        ctx.first = ctx.size * dist.get_rank(group)
        return gather(x, x.ndim - 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.first, ctx.size).contiguous(), None


STYLES: dict[str, Callable[[nn.Module, DeviceMesh, HiddenLayout], None]] = {
    # Shard output features: the module takes full hidden states and returns this rank's features.
    "column": partial(_distribute, style="column", weight=COLUMN, bias=COLUMN),
    "row": _row,
    "whole": _replicate,
    # Shard the width of every expert.
    "experts": partial(
        _distribute, style="experts", w1=ROW, w2=LAST, w3=ROW, w1_bias=ROW, w2_bias=ADDED_ONCE, w3_bias=ROW
    ),
    "moe": _moe,
    "adapter": partial(_distribute, style="adapter"),
    "gather": _gather_input,
    "embedding": _embedding,
    "head": _head,
    "gathered head": partial(_head, gathered=True),
    "classifier": _classifier,
}
