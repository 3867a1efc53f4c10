"""The linear layers that compute in float8, by name. Imports no torch."""

from __future__ import annotations

from toolkit.config.parallelism import Float8
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import linear_layers

MULTIPLE = 16
"""The sizes of matrices that GPUs multiply in float8 are multiples of it."""


def float8_layers(args: ModelArgs, options: Float8) -> dict[str, tuple[int, ...]]:
    """Those that compute in float8: a GPU takes their sizes, no part of ``filter_fqns`` is in the name."""
    return {
        name: shape
        for name, shape in linear_layers(args).items()
        if not any(size % MULTIPLE for size in shape)
        and not any(part in name for part in options.filter_fqns)
    }


def gathered_in_float8(rows: int, *, shards: int, tp: int) -> bool:
    """Say if a weight of ``rows`` can be: each rank has as many of them, without padding."""
    return rows % (shards * tp) == 0
