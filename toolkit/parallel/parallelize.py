"""The order in which techniques are applied to a model on the meta device, and nothing else."""

from __future__ import annotations

import torch

from toolkit.models.llama.model import Llama
from toolkit.models.llama.sharding import fsdp_units
from toolkit.parallel.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpoint
from toolkit.parallel.fsdp import apply_fsdp
from toolkit.parallel.mesh import Mesh


def parallelize(
    model: Llama,
    mesh: Mesh,
    *,
    checkpointing: ActivationCheckpointing,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: str,
) -> None:
    """Make ``model`` a sharded one, in place. ``fully_shard`` is applied at every size, 1 included."""
    apply_activation_checkpoint(model.layers, checkpointing)
    apply_fsdp(
        model,
        fsdp_units(model),
        mesh.fsdp,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=reshard_after_forward,
    )
