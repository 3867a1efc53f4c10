"""Attention of one new token per row to earlier tokens, as two plain matmuls.

Shapes: B rows, T columns, H heads, K key/value heads, G = H / K, N = B·K, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit import cpu
from toolkit.cpu.blockwise_attention import has_tiles

_COLUMNS = 64
"""The number of columns in matmuls is a multiple of this, with the last ones masked: oneDNN compiles a matmul
for each number of columns, which takes ten times as long as the matmul."""
_MANY = 1 << 20
"""Number of key elements from which matmuls are faster than torch's AMX kernel, if heads share keys."""


def takes(q_B1HE: Tensor, k_B1KE: Tensor, columns: int) -> bool:
    """Return whether attention of one token to ``columns`` keys is computed as two plain matmuls.

    The matmuls are up to five times as fast as torch's kernel for bfloat16 on CPUs; with AMX, only for many
    columns and heads that share keys (benchmarks/LOG.md).
    """
    if q_B1HE.is_cuda or q_B1HE.dtype != torch.bfloat16 or not cpu.is_enabled():
        return False
    shared = q_B1HE.shape[2] > k_B1KE.shape[2]
    return not has_tiles() or (shared and k_B1KE.numel() * columns > _MANY)


def rounded(columns: int) -> int:
    """Round up to a number of columns that matmuls use."""
    return -(-columns // _COLUMNS) * _COLUMNS


def attend(q_B1HE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None, *, unseen: int) -> Tensor:
    """Attend to all columns except the last ``unseen``, which ``mask`` does not cover. Keys are the first
    operand, because a matmul with a transposed second operand copies it."""
    q_BKGE = q_B1HE.squeeze(1).unflatten(1, (k_BKTE.shape[1], -1))
    products = q_BKGE.new_empty(()), k_BKTE.flatten(0, 1), q_BKGE.flatten(0, 1).mT
    scores_NTG = torch.baddbmm(*products, beta=0, alpha=q_BKGE.shape[-1] ** -0.5)
    scores_BKGT = scores_NTG.mT.unflatten(0, q_BKGE.shape[:2])
    seen_BKGT = scores_BKGT[..., : k_BKTE.shape[2] - unseen]
    if mask is not None:
        seen_BKGT.masked_fill_(~mask, -torch.inf)
    if unseen:
        scores_BKGT[..., -unseen:] = -torch.inf
    return (scores_BKGT.softmax(-1) @ v_BKTE).flatten(1, 2)[:, None]
