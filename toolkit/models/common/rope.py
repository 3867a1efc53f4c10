"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) in Meta's layout, which rotates adjacent
pairs.

Shapes: B batch, S sequence, H heads, E head dim, P = E/2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.fused import Fused
from toolkit.models.common.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling, yarn_factor


def rope_frequencies(args: ModelArgs, device: torch.device | None = None) -> Tensor:
    """Return the frequency of each pair in radians per position, (P,) fp64, scaled if the model is."""
    exponents = torch.arange(0, args.rope_dim, 2, dtype=torch.float64, device=device) / args.rope_dim
    frequencies = args.rope_theta**-exponents
    match args.rope_scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case YarnScaling() as yarn:
            return _scale_yarn(frequencies, yarn, args.rope_theta)
        case scaling:
            return _scale(frequencies, scaling)


def attention_factor(args: ModelArgs) -> float:
    """Return the factor of cos and sin: that of YaRN, else 1."""
    if not isinstance(yarn := args.rope_scaling, YarnScaling):
        return 1.0
    return yarn_factor(yarn.factor) if yarn.attention_factor is None else yarn.attention_factor


def _scale_yarn(frequencies: Tensor, yarn: YarnScaling, theta: float) -> Tensor:
    n_pairs = len(frequencies)

    def index(turns: float) -> float:
        """Return the index of the pair that makes so many turns in the original context."""
        return n_pairs * math.log(yarn.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    first, last = index(yarn.beta_fast), index(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * n_pairs - 1)
    places = torch.arange(n_pairs, dtype=torch.float64, device=frequencies.device)
    divided = ((places - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies * (1 - divided + divided / yarn.factor)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Keep high frequencies, divide low ones by ``factor``, and interpolate between the two bounds."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_rotations(args: ModelArgs, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return cos and sin of position·frequency, times :func:`attention_factor`, as (… S, 1, P, 2), for
    ``positions`` (S,) or (B, S).

    The dtype is fp64 if ``dtype`` is, else fp32. Angles are computed in fp64: in fp32 they would be 0.008
    radians off at position 131,071. Recomputing them in each forward costs less than one norm. Recomputation
    avoids a limit on positions, and a buffer that could be lost on the meta device or cast with the model.
    """
    angles = positions.to(torch.float64)[..., None] * rope_frequencies(args, positions.device)
    precision = torch.promote_types(dtype, torch.float32)
    rotations = torch.stack((angles.cos(), angles.sin()), dim=-1)
    if (factor := attention_factor(args)) != 1:
        rotations = rotations * factor
    return rotations.to(precision)[..., None, :, :]


def query_scales(args: ModelArgs, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factors (… S, 1, 1) of queries in blocks without RoPE; see
    :class:`~toolkit.models.common.args.IRoPEArgs`. The dtype is that of :func:`rope_rotations`."""
    assert args.irope is not None
    floors = (positions.to(torch.float64) + 1).div(args.irope.temperature_floor).floor()
    scales = 1 + args.irope.temperature * floors.log1p()
    return scales.to(torch.promote_types(dtype, torch.float32))[..., None, None]


def rotate(x_BSHE: Tensor, rotations: Tensor) -> Tensor:
    """Rotate adjacent pairs of elements, preserving the dtype.

    On CPU in eager mode, complex multiplication is faster than separate cosines and sines; inductor generates
    no code for complex dtypes.
    """
    if torch.compiler.is_compiling():
        return _rotate_pairs(x_BSHE, rotations)
    if _fused_rotate.applies_to(x_BSHE):
        return _fused_rotate(x_BSHE, rotations)
    x_BSHP2 = x_BSHE.to(rotations.dtype).unflatten(-1, (-1, 2))
    rotated_BSHP2 = torch.view_as_real(torch.view_as_complex(x_BSHP2) * torch.view_as_complex(rotations))
    return rotated_BSHP2.flatten(-2).to(x_BSHE.dtype)


def _rotate_pairs(x_BSHE: Tensor, rotations: Tensor) -> Tensor:
    (even, odd), (cos, sin) = (
        x_BSHE.to(rotations.dtype).unflatten(-1, (-1, 2)).unbind(-1),
        rotations.unbind(-1),
    )
    rotated_BSHP2 = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated_BSHP2.flatten(-2).to(x_BSHE.dtype)


_fused_rotate = Fused("rotary", _rotate_pairs)
