"""The update of a step, queued on the device before the host knows whether it may happen.

The host has to see loss and gradient norm of a step before it goes on. Waiting for them and queueing the
update then would leave the device idle for as long as the host takes for hundreds of parameters. So the norm
is copied to the host, the update is queued behind it, and the host waits for the copy alone: while it goes on
to the next batch, the device still updates. torch's fused kernels clip and, where a number is not finite,
leave everything as it is by themselves, for its GradScaler: of what this is told they take part. On a CPU,
where nothing is queued, they save the pass over all gradients that clips them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.optim.grad_clip import EPSILON
from toolkit.optim.optimizer import OPTIMIZERS


def can_update_ahead(optimizer: Optimizer, device: torch.device) -> bool:
    """Say if the update is of parameters on ``device``, by kernels that can leave it out: those of a class of
    torch's or ours, since what a subclass does beside them would see gradients that are not clipped yet."""
    kind = type(optimizer)
    own = kind in OPTIMIZERS.values() or kind.__module__.startswith("torch.optim.")
    if not (own and getattr(optimizer, "_step_supports_amp_scaling", False)):
        return False
    updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return all(parameter.device.type == device.type for parameter in updated)


class Reading:
    """Numbers on their way to the host, which computes meanwhile."""

    def __init__(self, numbers: Tensor):
        self._copy = numbers.to("cpu", non_blocking=True)  # page-locked, where it comes from a GPU
        self._arrived = None
        if numbers.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[float]:
        """The numbers. Nothing that was queued after them is waited for."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


def update_ahead(optimizer: Optimizer, sound: Tensor, norm: Tensor, max_norm: float) -> None:
    """Queue the update with gradients of ``norm`` clipped to ``max_norm``, as :func:`grad_clip.clip_` does.

    Where it is not ``sound``, a boolean, parameters, gradients and the optimizer's state stay.
    """
    optimizer.found_inf = sound.logical_not().float()  # type: ignore[attr-defined]
    clips = max_norm > 0 and not math.isinf(max_norm)
    too_large = ((norm + EPSILON) / max_norm).clamp(min=1).float() if clips else None
    optimizer.grad_scale = too_large  # type: ignore[attr-defined]  # gradients are divided by it
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
