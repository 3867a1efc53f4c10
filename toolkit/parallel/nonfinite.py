"""The refusal of a batch whose loss or gradient is not finite, and where that began: found by a second
forward pass that watches every module.

One rank's NaN is on all ranks after the first collective. What tells them apart is who had it first: in the
earliest micro-batch, of the lowest layer there, from the first module that ran.
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

from toolkit.distributed.dtensor import clean_name, local, local_part
from toolkit.errors import TrainingError, first_few
from toolkit.optim.grad_clip import norms
from toolkit.parallel.model_parts import MicroBatch, ModelParts

if TYPE_CHECKING:
    from toolkit.optim.optimizer_in_backward import StepInBackward
    from toolkit.parallel.guard import Guard


def refuse(
    model_parts: ModelParts,
    batches: Sequence[MicroBatch],
    own_loss: Tensor,
    *,
    loss: float,
    grad_norm: float,
    early: StepInBackward | None,
    guard: Guard | None,
) -> None:
    """Refuse a batch whose global ``loss`` or ``grad_norm`` is not finite, or more than the ``guard`` lets
    pass, and have the guard, if there is one, decide what follows; ``own_loss`` is this rank's share.

    Raises:
        TrainingError: the run ends here, with where it began; the same message on all ranks.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        assert guard is not None
        return guard.refuse_spike(loss, grad_norm)
    named = model_parts.named_parameters()
    if early:
        names = early.nonfinite(named)
        updated = "were updated by this step already, in backward (optimizer.early_step_in_backward)"
    else:
        names = nonfinite_parameters(named)
        updated = "were not updated by this step"
    if math.isfinite(loss):
        began = f"gradients that are not finite: {_where(names) or 'none (the norm itself overflowed)'}"
    else:
        # After an update in backward, another forward pass would see other parameters.
        found = [] if early else origins(model_parts, batches)
        mine = [] if own_loss.isfinite() else [f"its part of the loss{model_parts.coordinates}"]
        told = first_few([str(one) for one in found], 3) or _where(mine)
        told = told or "the sum of the ranks' losses"
        began = f"it began in {told}"
    if guard and guard.goes_on_after_nan:
        return guard.refuse_nan(loss, grad_norm, began)
    raise TrainingError(
        f"the loss is {loss} and the gradient norm {grad_norm}: training cannot go on\n"
        f"  {began}\n"
        "  fix:  lower optimizer.lr, lengthen lr_scheduler.warmup_steps, resume from an earlier "
        f"checkpoint (checkpoint.load_step), or set health.nan_policy; the parameters {updated}"
    )


def nonfinite_parameters(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
) -> list[str]:
    """Names of the parameters of which this rank's part of the gradient holds a NaN or an infinity."""
    named = [(name, local(p.grad)) for name, p in named_parameters if p.grad is not None]
    named = [(name, gradient) for name, gradient in named if gradient.numel()]
    if not named:
        return []
    # In fp64 the squares of fp32 values cannot overflow: a norm is finite just when all elements are.
    finite = torch.stack(norms([gradient for _, gradient in named])).isfinite().tolist()
    return [name for (name, _), sound in zip(named, finite, strict=True) if not sound]


def _where(names: Sequence[str]) -> str:
    """The ranks that have ``names`` to tell, and theirs; the same text on all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(names))
    return "; ".join(f"rank {rank}: {first_few(found, 3)}" for rank, found in enumerate(gathered) if found)


@dataclass(frozen=True)
class Finding:
    """The first value of a rank that is not finite: in what, and ``when``, by which ranks compare."""

    rank: int
    dp_rank: int
    coordinates: str
    when: tuple[int, int, int]  # micro-batch, layer, modules that had run; parameters are before all
    what: str

    def __str__(self) -> str:
        micro_batch = f", micro-batch {self.when[0] + 1}" if self.when[0] >= 0 else ""
        return f"{self.what} on rank {self.rank}{self.coordinates}{micro_batch}"


class _Watch:
    """Hooks that keep the first finding."""

    def __init__(self, model_parts: ModelParts):
        self.model_parts = model_parts
        self.micro_batch = self.ran = 0
        self.finding: Finding | None = None

    def add_to(self, model: nn.Module, stack: ExitStack) -> None:
        for name, module in model.named_modules():
            if name and name != "layers":  # a dictionary, which never runs
                stack.callback(module.register_forward_hook(self._hook(clean_name(name))).remove)

    def _hook(self, name: str) -> Any:
        words = name.split(".")
        # The embedding is before the layers; the norm and the head are after them.
        layer = int(words[1]) if words[0] == "layers" else -1 if words[0] == "tok_embeddings" else 1 << 30

        def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.ran += 1
            if self.finding is None and not (_finite(args[:1]) and _finite(output)):
                what = name if _finite(args[:1]) else f"the input of {name}"
                self.finding = _finding(self.model_parts, (self.micro_batch, layer, self.ran), what)

        return look


def _finding(model_parts: ModelParts, when: tuple[int, int, int], what: str) -> Finding:
    return Finding(dist.get_rank(), model_parts.dp_rank, model_parts.coordinates, when, what)


def _parameter(model_parts: ModelParts) -> Finding | None:
    """The first parameter of which this rank's shard is not finite."""
    for name, parameter in model_parts.named_parameters():
        if not _finite(parameter):
            return _finding(model_parts, (-1, 0, 0), f"the parameter {name}")
    return None


def _finite(values: Any) -> bool:
    if isinstance(values, tuple | list):
        return all(map(_finite, values))
    if not isinstance(values, Tensor) or not values.is_floating_point():
        return True
    return bool(local_part(values)[0].isfinite().all())


@torch.no_grad()
def origins(model_parts: ModelParts, batches: Sequence[MicroBatch]) -> list[Finding]:
    """The parameters that are not finite, else the first findings of each part of the batch; the same list on
    all ranks, empty where the forward pass is finite now. Compiled blocks run as they are written."""
    if found := _gathered(_parameter(model_parts)):
        return found
    watch = _Watch(model_parts)
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for model in model_parts.models:
            watch.add_to(model, stack)
        for watch.micro_batch, batch in enumerate(batches):
            model_parts.loss(batch)
    model_parts.end_evaluation()
    found = _gathered(watch.finding)
    first = {one.dp_rank: min(other.when for other in found if other.dp_rank == one.dp_rank) for one in found}
    return [one for one in found if one.when == first[one.dp_rank]]


def _gathered(finding: Finding | None) -> list[Finding]:
    findings: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(findings, finding)
    return [finding for finding in findings if finding]
