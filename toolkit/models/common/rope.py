"""Rotary positions (Su et al. 2021, arXiv:2104.09864) in Meta's layout, where neighbours are a pair.

Shapes: B batch, S sequence, H heads, E head dim, P = E/2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toolkit.fused import Fused
from toolkit.models.common.args import ModelArgs, RopeScaling


def rope_frequencies(args: ModelArgs, device: torch.device | None = None) -> Tensor:
    """Radians a position for each pair: (P,) fp64. Slow ones are divided by Llama 3.1's factor."""
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.float64, device=device) / args.head_dim
    frequencies = args.rope_theta**-exponents
    return frequencies if args.rope_scaling is None else _scale(frequencies, args.rope_scaling)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths that turn often within the original context stay, those that do not get ``factor``
    times longer, and between the two bounds the change is gradual."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_rotations(args: ModelArgs, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """cos and sin of position·frequency for ``positions`` (S,) or (B, S): (… S, 1, P, 2) for :func:`rotate`.

    fp32, or fp64 where ``dtype`` is. Angles are taken in fp64: at position 131,071 fp32 would be 0.008
    radians off. Computed anew in each forward, which costs less than one norm: no buffer to lose on the
    meta device or to be cast with the model, and no limit on positions.
    """
    angles = positions.to(torch.float64)[..., None] * rope_frequencies(args, positions.device)
    precision = torch.promote_types(dtype, torch.float32)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(precision)[..., None, :, :]


def rotate(x_BSHE: Tensor, rotations: Tensor) -> Tensor:
    """Turn neighbouring pairs (Meta's layout) by the rotations; the dtype stays.

    As complex numbers this is faster in eager mode on CPU than with separate cosines and sines; inductor
    generates no code for complex numbers.
    """
    if torch.compiler.is_compiling():
        return _turned(x_BSHE, rotations)
    if _turn.applies_to(x_BSHE):
        return _turn(x_BSHE, rotations)
    x_BSHP2 = x_BSHE.to(rotations.dtype).unflatten(-1, (-1, 2))
    turned_BSHP2 = torch.view_as_real(torch.view_as_complex(x_BSHP2) * torch.view_as_complex(rotations))
    return turned_BSHP2.flatten(-2).to(x_BSHE.dtype)


def _turned(x_BSHE: Tensor, rotations: Tensor) -> Tensor:
    (even, odd), (cos, sin) = (
        x_BSHE.to(rotations.dtype).unflatten(-1, (-1, 2)).unbind(-1),
        rotations.unbind(-1),
    )
    turned_BSHP2 = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned_BSHP2.flatten(-2).to(x_BSHE.dtype)


_turn = Fused("rotary", _turned)
