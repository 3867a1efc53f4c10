"""Attention of one new token a row to those before it, as two plain products.

Shapes: B rows, T columns, H heads, K key/value heads, G = H / K, N = B·K, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit import cpu
from toolkit.cpu.blockwise_attention import has_tiles

_COLUMNS = 64
"""In products a token attends to so many columns or a multiple, the last ones masked: oneDNN compiles a
product for each number of columns, at ten times the product's time."""
_MANY = 1 << 20
"""Numbers of keys from which products are faster than torch's kernel with tiles, where heads share keys."""


def takes(q_B1HE: Tensor, k_B1KE: Tensor, columns: int) -> bool:
    """Return whether attention of one token to ``columns`` keys is two plain matmuls.

    They are up to five times as fast as torch's kernel for bfloat16 on CPUs; with AMX only for many columns
    and heads that share keys (benchmarks/LOG.md).
    """
    if q_B1HE.is_cuda or q_B1HE.dtype != torch.bfloat16 or not cpu.is_enabled():
        return False
    shared = q_B1HE.shape[2] > k_B1KE.shape[2]
    return not has_tiles() or (shared and k_B1KE.numel() * columns > _MANY)


def rounded(columns: int) -> int:
    """Round up to a number of columns that products take."""
    return -(-columns // _COLUMNS) * _COLUMNS


def attend(q_B1HE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None, *, unseen: int) -> Tensor:
    """Attend to all columns but the last ``unseen``, of which ``mask`` says nothing. Keys are the first
    factor, since a product with a transposed second one copies it."""
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
