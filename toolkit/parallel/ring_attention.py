"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values travel from rank to rank.

Each rank hands on the keys and values that it has once for every other rank, and attends to those that it
holds meanwhile; the log-sum-exps of the parts make them one softmax. In backward they travel again, and
their gradients with them. A rank holds its own and those under way, never all, and keeps its own alone for
backward; in return it sends them twice, and calls a kernel for each two pieces.

It takes a kernel that hands out its log-sum-exp and takes one back: torch's flash attention. The CPU's takes
a mask for the documents of two pieces, and for a window; CUDA's has none, and computes in 16 bits. A piece
that a window hides whole costs no kernel.

Shapes: B batch, S a rank's part of the sequence, P a piece of it, H heads, K key/value heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from toolkit.compat import (
    flash_attention,
    flash_attention_backward,
    flash_attention_cpu,
    flash_attention_cpu_backward,
)
from toolkit.distributed.collectives import start_all_to_all, wait
from toolkit.models.common.attention import AttentionBackend
from toolkit.parallel.sequence_shards import SequenceShards

_UNSEEN = -1e30
"""Added to the score of a key that a query may not see. Finite, for queries that see none of a piece: their
part has a finite result then, and next to no weight beside the others."""


class RingAttention(AttentionBackend):
    """Causal attention of this rank's queries to the keys and values of all ranks, one rank's at a time."""

    def __init__(self, shards: SequenceShards, mesh: DeviceMesh, window: int | None = None):
        super().__init__(window)
        self.shards = shards
        self.group = mesh.get_group()

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Tensor | None:
        """``documents_BS`` of whole sequences: each two pieces make their own mask of them."""
        if documents_BS is not None and device.type == "cuda":
            raise ValueError("the flash kernel takes no mask, so that documents would see one another")
        if self.reach(length * self.shards.size) and device.type == "cuda":
            raise ValueError("the flash kernel takes no mask, so that tokens would see beyond their window")
        return documents_BS

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Tensor | None) -> Tensor:
        window = self.reach(q_BSHE.shape[1] * self.shards.size)
        return _Ring.apply(q_BSHE, k_BSKE, v_BSKE, mask, window, self.shards, self.group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        window: int | None,
        shards: SequenceShards,
        group: dist.ProcessGroup,
    ) -> Tensor:
        pieces = shards.of(shards.rank)
        queries = q.transpose(1, 2).chunk(len(pieces), dim=2)
        sums: list[tuple[Tensor, Tensor] | None] = [None] * len(pieces)
        held = torch.stack([k, v])
        for step in range(shards.size):
            arriving = _hand_on(held, shards, group) if step + 1 < shards.size else held
            for i, j, one, other in _seen(shards, step, queries[0].shape[2], window):
                keys, values = _piece(held, j, len(pieces))
                mask = _mask(documents, shards, one, other, queries[i], window)
                sums[i] = _merged(sums[i], _attend(queries[i], keys, values, one == other, mask))
            held = _arrived(arriving, held)
        found = [part for part in sums if part is not None]
        out = torch.cat([part for part, _ in found], dim=2).to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, torch.cat([lse for _, lse in found], dim=2))
        ctx.shards, ctx.group, ctx.window = shards, group, window
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, documents, out, lse = ctx.saved_tensors
        shards, group = ctx.shards, ctx.group
        n = len(shards.of(shards.rank))
        precise = torch.promote_types(q.dtype, torch.float32)
        whole = (q.transpose(1, 2), out, lse, grad.transpose(1, 2))
        queries = list(zip(*(x.chunk(n, dim=2) for x in whole), strict=True))
        grad_q = torch.zeros(q.shape, dtype=precise, device=q.device)
        held = torch.stack([k, v])
        grad_held = torch.zeros(held.shape, dtype=precise, device=q.device)
        for step in range(shards.size):
            arriving = _hand_on(held, shards, group) if step + 1 < shards.size else held
            for i, j, one, other in _seen(shards, step, queries[0][0].shape[2], ctx.window):
                keys, values = _piece(held, j, n)
                mask = _mask(documents, shards, one, other, queries[i][0], ctx.window)
                parts = _attend_backward(queries[i], keys, values, one == other, mask)
                sums = (_piece(grad_q[None], i, n)[0], *_piece(grad_held, j, n))
                for total, part in zip(sums, parts, strict=True):
                    total += part
            held = _arrived(arriving, held)
            # After the last step these have come home.
            grad_held = _arrived(_hand_on(grad_held, shards, group), grad_held)
        grad_k, grad_v = grad_held.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _seen(
    shards: SequenceShards, step: int, size: int, window: int | None
) -> list[tuple[int, int, int, int]]:
    """Which of this rank's pieces, of ``size`` tokens, see which of those that it holds at ``step``, by their
    places here and then in the sequence: a piece sees those before it that its window reaches, and of itself
    what is before each token."""
    mine, theirs = shards.of(shards.rank), shards.of((shards.rank - step) % shards.size)
    return [
        (i, j, one, other)
        for i, one in enumerate(mine)
        for j, other in enumerate(theirs)
        if other <= one and (window is None or (one - other - 1) * size + 1 < window)
    ]


def _mask(
    documents: Tensor | None, shards: SequenceShards, one: int, other: int, q: Tensor, window: int | None
) -> Tensor | None:
    """Build the mask that keeps the queries ``q`` (B, H, P, E) of piece ``one`` within their documents and
    their window among the keys of piece ``other``, to be added to scores: (B or 1, 1, P, P); None where it
    hides nothing but what comes after a token."""
    size = q.shape[2]
    after = (one - other) * size  # tokens from the first key to the first query
    if window is not None and after + size <= window:
        window = None
    if documents is None and window is None:
        return None
    same = torch.ones(1, 1, size, size, dtype=torch.bool, device=q.device)
    if documents is not None:
        parts = documents.chunk(shards.pieces, dim=1)
        same = parts[one][:, None, :, None] == parts[other][:, None, None, :]
    if one == other:
        same = same.tril()
    if window is not None:
        same = same.triu(after + 1 - window)
    return torch.zeros_like(same, dtype=q.dtype).masked_fill(~same, _UNSEEN)


def _piece(held: Tensor, index: int, of: int) -> list[Tensor]:
    """Piece ``index`` of each (B, S, K, E), as kernels want it: (B, K, P, E)."""
    return [x.chunk(of, dim=1)[index].transpose(1, 2) for x in held]


def _hand_on(x: Tensor, shards: SequenceShards, group: dist.ProcessGroup) -> Tensor:
    """Begin to send ``x`` to the next rank, and to receive the previous one's, flat."""
    sent, received = [0] * shards.size, [0] * shards.size
    sent[(shards.rank + 1) % shards.size] = x.numel()
    received[(shards.rank - 1) % shards.size] = x.numel()
    return start_all_to_all(x.flatten(), received, sent, group.group_name)


def _arrived(arriving: Tensor, like: Tensor) -> Tensor:
    return arriving if arriving is like else wait(arriving).view(like.shape)


def _merged(sums: tuple[Tensor, Tensor] | None, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The softmax over the keys of both, from results and log-sum-exps (B, H, P)."""
    out, lse = part
    if sums is None:
        return out.to(lse.dtype), lse
    before, lse_before = sums
    total = torch.logaddexp(lse_before, lse)
    weights = ((lse_before - total).exp()[..., None], (lse - total).exp()[..., None])
    return before * weights[0] + out * weights[1], total


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result (B, H, P, E) and its log-sum-exp (B, H, P). A mask has the causal order in it."""
    if q.is_cuda:
        return flash_attention(q, k, v, 0.0, causal)[:2]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    causal = causal and mask is None
    return flash_attention_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def _attend_backward(
    queries: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. ``queries`` are q, its result and log-sum-exp over all keys, of which
    these have their share, and the result's gradient."""
    q, out, lse, grad = queries
    if q.is_cuda:
        sizes = (None, None, q.shape[2], k.shape[2])
        # The state of a dropout that there is not.
        random = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
        return flash_attention_backward(grad, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, *random)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    grad_q, *grads = flash_attention_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=mask
    )
    grad_k, grad_v = (x.unflatten(1, (-1, group)).sum(2) for x in grads)
    return grad_q, grad_k, grad_v
