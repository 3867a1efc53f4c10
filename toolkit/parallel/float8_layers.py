"""Selection of the linear layers that compute in float8. Imports no torch."""

from __future__ import annotations

from toolkit.config.parallelism import Float8
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import linear_layers

MULTIPLE = 16
"""GPUs require the sizes of float8 matrices to be multiples of this."""


def float8_layers(args: ModelArgs, options: Float8) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes of the layers that compute in float8: supported sizes, and names that contain
    no entry of ``filter_fqns``."""
    return {
        name: shape
        for name, shape in linear_layers(args).items()
        if not any(size % MULTIPLE for size in shape)
        and not any(part in name for part in options.filter_fqns)
    }


def can_gather_in_float8(rows: int, *, shards: int, tp: int) -> bool:
    """Return whether FSDP can gather a weight of ``rows`` in float8, which requires equal shards."""
    return rows % (shards * tp) == 0
