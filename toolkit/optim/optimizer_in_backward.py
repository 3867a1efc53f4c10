"""Optimizer step in backward: each parameter is updated when its gradient is ready, and the gradient is
freed.

Sharded gradients, 4 bytes per parameter in fp32, exist for only one FSDP unit at a time. FSDP2 calls a
parameter's post-accumulate-grad hooks when its reduced gradient shard is ready, on the reduction's stream.
The end of backward waits for that stream. A parameter that is used twice, such as a tied embedding, has one
gradient and one call.

With replicas, torch 2.13 keeps the reduced gradients of all units until backward ends, so no memory is saved.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.optim.grad_clip import local_square, norm_over_ranks


class StepInBackward(Optimizer):
    """Wraps ``optimizer`` and updates each parameter in backward, with the same groups and state.

    Every backward is a step, so gradients cannot be accumulated, and parameters are updated before the global
    norm is known, so gradients cannot be clipped. Set the groups' learning rate before backward.
    """

    def __init__(self, optimizer: Optimizer):
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._inner = optimizer  # given one parameter at a time
        if hasattr(optimizer, "fresh_state"):
            self.fresh_state = optimizer.fresh_state
        self._group = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self._index = {parameter: index for index, parameter in enumerate(self._group)}
        device = next(iter(self._index)).device
        self._squares = torch.zeros(len(self._index), dtype=torch.float64, device=device)
        for parameter in self._group:
            parameter.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._squares[self._index[parameter]] = local_square(parameter.grad)
        self._inner.param_groups = [{**self._group[parameter], "params": [parameter]}]
        self._inner.step()
        parameter.grad = None

    def gradient_norm(self, *, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
        """Return the 2-norm of the last backward's gradients over all ranks: an fp64 scalar on ``device``."""
        return norm_over_ranks(self._squares.sum(), device=device, group=group)

    def nonfinite(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
        """Return the names of parameters whose last gradient shard on this rank was not finite."""
        finite = dict(zip(self._index, self._squares.isfinite().tolist(), strict=True))
        return [name for name, parameter in named_parameters if not finite.get(parameter, True)]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Do nothing: all steps were done in backward."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the norms of the last backward; its gradients are already freed."""
        self._squares.zero_()
