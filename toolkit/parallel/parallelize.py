"""The order in which techniques are applied to a model on the meta device, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.models.llama.model import Llama
from toolkit.models.llama.sharding import fsdp_units
from toolkit.parallel.activation_checkpoint import ActivationCheckpointing, apply_activation_checkpoint
from toolkit.parallel.fsdp import Sharding, apply_fsdp
from toolkit.parallel.mesh import Mesh

if TYPE_CHECKING:  # read only by runs that use them
    from toolkit.parallel.compile import Compiling
    from toolkit.parallel.wrap import Wrapping


def parallelize(
    model: Llama,
    mesh: Mesh,
    *,
    checkpointing: ActivationCheckpointing,
    compiling: Compiling | None,
    wrapping: Wrapping | None,
    sharding: Sharding,
) -> None:
    """Make ``model`` a sharded one, in place. ``fully_shard`` is applied at every size, 1 included.

    ``compiling`` None is eager, ``wrapping`` None the model's own units.
    """
    apply_activation_checkpoint(model.layers, checkpointing)
    if compiling:
        from toolkit.parallel.compile import apply_compile

        apply_compile(model, compiling)
    if wrapping:
        from toolkit.parallel.wrap import wrapped_units

        units = wrapped_units(model, wrapping)
    else:
        units = fsdp_units(model)
    apply_fsdp(model, units, mesh.fsdp, sharding)
