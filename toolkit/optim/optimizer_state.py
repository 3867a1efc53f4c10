"""The state of an optimizer as named tensors, for a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.distributed.dtensor import clean_name
from toolkit.optim.optimizer import NamedParameters


def optimizer_tensors(parameters: NamedParameters, optimizer: Optimizer) -> dict[str, Tensor]:
    """The live state of ``optimizer`` as ``optim.<name>.exp_avg``, ``.exp_avg_sq`` and ``.step``.

    Moments have the shape and layout of their parameter; ``step`` is a float32 scalar. Other optimizers than
    torch's Adam have tensors of other names. Writing into these tensors changes the optimizer. State that
    does not exist yet, before the first step, is made here exactly as the optimizer would make it, so that a
    checkpoint can be loaded in place and the run that goes on from it equals the one that never stopped bit
    for bit.
    """
    owner = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    fresh_state = getattr(optimizer, "fresh_state", adam_state)
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
    return tensors


def adam_state(parameter: nn.Parameter, group: dict) -> dict[str, Tensor]:
    # The fused kernels count steps on the device; the others keep the count on the CPU, because a
    # kernel launch for a scalar costs more than the scalar.
    device = parameter.device if group["fused"] else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
