"""The optimizer state as named tensors, for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.distributed.dtensor import clean_name
from toolkit.optim.ema import weight_average
from toolkit.optim.optimizer import NamedParameters

EMA_PREFIX = "ema."


def optimizer_tensors(parameters: NamedParameters, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the live state of ``optimizer`` as ``optim.<name>.exp_avg``, ``.exp_avg_sq`` and ``.step``.

    Moments have the shape and sharding of their parameter; ``step`` is a float32 scalar. Optimizers other
    than torch's Adam have other names. Writing to these tensors changes the optimizer. Before the first step,
    the state is created exactly as the optimizer would create it, so that a checkpoint can be loaded in place
    and the resumed run is bit-identical to an uninterrupted one. The moving average of a weight is
    ``ema.<name>``.
    """
    owner = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    fresh_state = getattr(optimizer, "fresh_state", adam_state)
    average = weight_average(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        if id(parameter) not in owner:
            assert not parameter.requires_grad, f"{name} is trained, but not by this optimizer"
            continue
        state = optimizer.state[parameter]
        if not state:
            state.update(fresh_state(parameter, owner[id(parameter)]))
        for key, value in state.items():
            tensors[f"optim.{clean_name(name)}.{key}"] = value
        if average:
            tensors[f"{EMA_PREFIX}{clean_name(name)}"] = average.averages[parameter]
    return tensors


def adam_state(parameter: nn.Parameter, group: dict) -> dict[str, Tensor]:
    # As in torch, fused kernels count steps on the device, others on the CPU.
    device = parameter.device if group["fused"] else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
