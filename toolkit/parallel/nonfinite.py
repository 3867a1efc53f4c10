"""Reject a batch with a nonfinite loss or gradient, and locate the origin by a second forward pass with hooks
on every module.

After the first collective, a NaN is on all ranks. The origin is the first occurrence: the earliest
micro-batch, then the lowest layer, then the first module that ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.distributed.dtensor import clean_name, local, shard_and_offset
from toolkit.errors import TrainingError, first_few
from toolkit.optim.grad_clip import norms
from toolkit.parallel.model_parts import MicroBatch, ModelParts

if TYPE_CHECKING:
    from toolkit.optim.optimizer_in_backward import StepInBackward
    from toolkit.parallel.guard import Guard


def reject_batch(
    model_parts: ModelParts,
    batches: Sequence[MicroBatch],
    local_loss: Tensor,
    *,
    loss: float,
    grad_norm: float,
    early: StepInBackward | None,
    guard: Guard | None,
) -> None:
    """Reject a batch whose global ``loss`` or ``grad_norm`` is not finite or exceeds the limits of ``guard``.

    The guard, if any, decides whether the run continues; ``local_loss`` is this rank's contribution to the
    loss.

    Raises:
            TrainingError: the run stops; the message contains the origin and is the same on all ranks.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        assert guard is not None
        return guard.reject_spike(loss, grad_norm)
    named = model_parts.named_parameters()
    if early:
        names = early.nonfinite(named)
        updated = "were already updated by this step, in backward (optimizer.early_step_in_backward)"
    else:
        names = nonfinite_parameters(named)
        updated = "were not updated by this step"
    if math.isfinite(loss):
        origin = f"non-finite gradients: {_names_by_rank(names) or 'none (the norm overflowed)'}"
    else:
        # After an update in backward, a second forward pass would use other parameters.
        found = [] if early else origins(model_parts, batches)
        local_names = [] if local_loss.isfinite() else [f"its part of the loss{model_parts.coordinates}"]
        first = first_few([str(one) for one in found], 3) or _names_by_rank(local_names)
        origin = f"it began in {first or 'the sum of the losses of all ranks'}"
    if guard and guard.continues_after_nan:
        return guard.reject_nan(loss, grad_norm, origin)
    raise TrainingError(
        f"the loss is {loss} and the gradient norm {grad_norm}: training cannot continue\n"
        f"  {origin}\n"
        "  fix:  lower optimizer.lr, increase lr_scheduler.warmup_steps, resume from an earlier "
        f"checkpoint (checkpoint.load_step), or set health.nan_policy; the parameters {updated}"
    )


def nonfinite_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Return the names of parameters whose local gradient shard contains a NaN or an infinity."""
    named = [(name, local(p.grad)) for name, p in named_parameters if p.grad is not None]
    named = [(name, gradient) for name, gradient in named if gradient.numel()]
    if not named:
        return []
    # In fp64 the squares of fp32 values cannot overflow: a norm is finite if and only if all elements are.
    finite = torch.stack(norms([gradient for _, gradient in named])).isfinite().tolist()
    return [name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite]


def _names_by_rank(names: Sequence[str]) -> str:
    """Gather the ``names`` of all ranks and format them; the message is the same on all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(names))
    return "; ".join(f"rank {rank}: {first_few(some, 3)}" for rank, some in enumerate(gathered) if some)


@dataclass(frozen=True)
class Finding:
    """The first nonfinite value on a rank; ``what`` contains it, and ``when`` orders findings across
    ranks."""

    rank: int
    dp_rank: int
    coordinates: str
    when: tuple[int, int, int]  # micro-batch, layer, number of modules that ran; parameters come first
    what: str

    def __str__(self) -> str:
        micro_batch = f", micro-batch {self.when[0] + 1}" if self.when[0] >= 0 else ""
        return f"{self.what} on rank {self.rank}{self.coordinates}{micro_batch}"


class _FirstNonfinite:
    """Forward hooks that record the first finding."""

    def __init__(self, model_parts: ModelParts):
        self.model_parts = model_parts
        self.micro_batch = self.ran = 0
        self.finding: Finding | None = None

    def add_to(self, model: nn.Module, stack: ExitStack) -> None:
        for name, module in model.named_modules():
            if name and name != "layers":  # the ModuleDict, which has no forward
                stack.callback(module.register_forward_hook(self._hook(clean_name(name))).remove)

    def _hook(self, name: str) -> Any:
        words = name.split(".")
        # The embedding runs before the layers; the norm and the head run after them.
        layer = int(words[1]) if words[0] == "layers" else -1 if words[0] == "tok_embeddings" else 1 << 30

        def check(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.ran += 1
            if self.finding is None and not (_finite(args[:1]) and _finite(output)):
                what = name if _finite(args[:1]) else f"the input of {name}"
                self.finding = _finding(self.model_parts, (self.micro_batch, layer, self.ran), what)

        return check


def _finding(model_parts: ModelParts, when: tuple[int, int, int], what: str) -> Finding:
    return Finding(dist.get_rank(), model_parts.dp_rank, model_parts.coordinates, when, what)


def _nonfinite_parameter(model_parts: ModelParts) -> Finding | None:
    """Return the first parameter with a nonfinite shard on this rank."""
    for name, parameter in model_parts.named_parameters():
        if not _finite(parameter):
            return _finding(model_parts, (-1, 0, 0), f"the parameter {name}")
    return None


def _finite(values: Any) -> bool:
    if isinstance(values, tuple | list):
        return all(map(_finite, values))
    if not isinstance(values, Tensor) or not values.is_floating_point():
        return True
    return bool(shard_and_offset(values)[0].isfinite().all())


@torch.no_grad()
def origins(model_parts: ModelParts, batches: Sequence[MicroBatch]) -> list[Finding]:
    """Return nonfinite parameters if there are any, else the first finding of each data-parallel rank.

    The list is the same on all ranks, and empty if this forward pass is finite. Compiled blocks run eagerly.
    """
    if found := _gather_findings(_nonfinite_parameter(model_parts)):
        return found
    hooks = _FirstNonfinite(model_parts)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for model in model_parts.models:
            hooks.add_to(model, stack)
        for hooks.micro_batch, batch in enumerate(batches):
            model_parts.loss(batch)
    model_parts.end_evaluation()
    found = _gather_findings(hooks.finding)
    first = {one.dp_rank: min(other.when for other in found if other.dp_rank == one.dp_rank) for one in found}
    return [one for one in found if one.when == first[one.dp_rank]]


def _gather_findings(finding: Finding | None) -> list[Finding]:
    findings: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, finding)
    return [finding for finding in findings if finding]
