"""Queue the optimizer update on the device before the host knows whether it is valid.

The host needs the loss and gradient norm of a step before it continues. If it queued the update only then,
the device would idle while the host launches kernels for hundreds of parameters. Therefore the norm is copied
to the host, the update is queued after the copy, and the host waits only for the copy. The host prepares the
next batch while the device updates. torch's fused kernels can scale gradients, and skip the update if a value
is not finite, as they do for GradScaler. On a CPU, nothing is queued, but clipping needs no separate pass
over all gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.optim.grad_clip import EPSILON
from toolkit.optim.optimizer import OPTIMIZERS


def can_update_ahead(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether all parameters are on ``device`` and the optimizer's kernels can skip the update.

    Only classes of torch and of this toolkit qualify, because the code of a subclass would see unclipped
    gradients.
    """
    kind = type(optimizer)
    is_known = kind in OPTIMIZERS.values() or kind.__module__.startswith("torch.optim.")
    if not (is_known and getattr(optimizer, "_step_supports_amp_scaling", False)):
        return False
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return all(parameter.device.type == device.type for parameter in parameters)


class AsyncRead:
    """An asynchronous copy of values to the host."""

    def __init__(self, values: Tensor):
        self._copy = values.to("cpu", non_blocking=True)  # pinned, if it comes from a GPU
        self._done = None
        if values.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> list[float]:
        """Return the values, without waiting for work queued later."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()


def update_ahead(optimizer: Optimizer, valid: Tensor, norm: Tensor, max_norm: float) -> None:
    """Queue the update with gradients of ``norm`` clipped to ``max_norm``, as in :func:`grad_clip.clip_`.

    If ``valid``, a boolean tensor, is false, parameters, gradients and optimizer state do not change.
    """
    optimizer.found_inf = valid.logical_not().float()  # type: ignore[attr-defined]
    clips = max_norm > 0 and not math.isinf(max_norm)
    scale = ((norm + EPSILON) / max_norm).clamp(min=1).float() if clips else None
    optimizer.grad_scale = scale  # type: ignore[attr-defined]  # the kernels divide gradients by it
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
