"""The optimizer's step in backward: a parameter is updated when its gradient is there, which is then freed.

Of the sharded gradients, 4 bytes a parameter in fp32, only those of one FSDP unit exist at a time. FSDP2
calls a parameter's post-accumulate-grad hooks once its part of the reduced gradient is there, on the
stream of the reduction, for which the end of backward waits. A parameter that is used twice, such as a
tied embedding, has one gradient and one call.

With replicas torch 2.13 keeps every unit's reduced gradients until backward ends, so that nothing is saved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.optim.grad_clip import local_square, norm_over_ranks


class StepInBackward(Optimizer):
    """``optimizer``, its groups and state, with the step taken parameter by parameter in each backward.

    One backward is one step, so gradients cannot be accumulated over several, and each parameter moves
    before the norm of all gradients is known, so they cannot be clipped. Set the learning rate of the
    groups, whose parameters have names, before the backward.
    """

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._one = optimizer  # updates the one parameter that it is given
        if hasattr(optimizer, "fresh_state"):
            self.fresh_state = optimizer.fresh_state
        self._group = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self._place = {parameter: place for place, parameter in enumerate(self._group)}
        device = next(iter(self._place)).device
        self._squares = torch.zeros(len(self._place), dtype=torch.float64, device=device)
        for parameter in self._group:
            parameter.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._squares[self._place[parameter]] = local_square(parameter.grad)
        self._one.param_groups = [{**self._group[parameter], "params": [parameter]}]
        self._one.step()
        parameter.grad = None

    def gradient_norm(self, *, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
        """The 2-norm of the gradients of the last backward over all ranks: an fp64 scalar on ``device``."""
        return norm_over_ranks(self._squares.sum(), device=device, group=group)

    def nonfinite(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
        """Names of the parameters of which this rank's part of the last gradient was not finite."""
        finite = dict(zip(self._place, self._squares.isfinite().tolist(), strict=True))
        return [name for name, parameter in named_parameters if not finite.get(parameter, True)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Nothing: all steps were taken in backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the norms of the last backward; its gradients are gone."""
        self._squares.zero_()
