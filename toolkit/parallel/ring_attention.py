"""Ring attention (Liu et al. 2023, arXiv:2310.01889): keys and values rotate from rank to rank.

In each of cp steps, a rank sends its current keys and values to the next rank while it attends to them.
Partial results are combined by their log-sum-exps. In backward, keys and values rotate again, together with
their gradients. A rank stores only its own keys and values and those in flight, and saves only its own for
backward. In return, it sends keys and values twice and launches one kernel per pair of chunks.

The kernel must return its log-sum-exp and accept one in backward, as torch's flash attention does. On CPU it
supports a mask, for documents and windows; on CUDA it has no mask and computes in 16 bits. Chunks outside the
window are skipped.

Shapes: B batch, S this rank's shard of the sequence, P a chunk of it, H heads, K key/value heads, E head dim.
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

_MASKED_SCORE = -1e30
"""Bias of masked scores. It is finite, so that a query without visible keys in a chunk gets a finite partial
result, which has no weight in the combination."""


class RingAttention(AttentionBackend):
    """Causal attention of this rank's queries to the keys and values of all ranks, one rank at a time."""

    def __init__(
        self, shards: SequenceShards, mesh: DeviceMesh, window: int | None = None, chunked: bool = False
    ):
        super().__init__(window, chunked)
        self.shards = shards
        self.group = mesh.get_group()

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Tensor | None:
        """Return the full sequences' ``documents_BS``, from which each pair of chunks builds its mask."""
        documents_BS = self.within_chunks(documents_BS, rows, length * self.shards.size, device)
        if documents_BS is not None and device.type == "cuda":
            raise ValueError("the flash kernel supports no mask: documents would attend to one another")
        if self.reach(length * self.shards.size) and device.type == "cuda":
            raise ValueError("the flash kernel supports no mask: tokens would attend beyond their window")
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
        n = len(shards.of(shards.rank))
        queries = q.transpose(1, 2).chunk(n, dim=2)
        sums: list[tuple[Tensor, Tensor] | None] = [None] * n
        kv = torch.stack([k, v])
        for step in range(shards.size):
            incoming = _send_to_next(kv, shards, group) if step + 1 < shards.size else kv
            for i, j, one, other in _visible_chunks(shards, step, queries[0].shape[2], window):
                keys, values = _chunk(kv, j, n)
                mask = _mask(documents, shards, one, other, queries[i], window)
                sums[i] = _combine(sums[i], _attend(queries[i], keys, values, one == other, mask))
            kv = _receive(incoming, kv)
        results = [result for result in sums if result is not None]
        out = torch.cat([result for result, _ in results], dim=2).to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, torch.cat([lse for _, lse in results], dim=2))
        ctx.shards, ctx.group, ctx.window = shards, group, window
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None, None]:
        q, k, v, documents, out, lse = ctx.saved_tensors
        shards, group = ctx.shards, ctx.group
        n = len(shards.of(shards.rank))
        precise = torch.promote_types(q.dtype, torch.float32)
        saved = (q.transpose(1, 2), out, lse, grad.transpose(1, 2))
        queries = list(zip(*(x.chunk(n, dim=2) for x in saved), strict=True))
        grad_q = torch.zeros(q.shape, dtype=precise, device=q.device)
        kv = torch.stack([k, v])
        grad_kv = torch.zeros(kv.shape, dtype=precise, device=q.device)
        for step in range(shards.size):
            incoming = _send_to_next(kv, shards, group) if step + 1 < shards.size else kv
            for i, j, one, other in _visible_chunks(shards, step, queries[0][0].shape[2], ctx.window):
                keys, values = _chunk(kv, j, n)
                mask = _mask(documents, shards, one, other, queries[i][0], ctx.window)
                partial = _attend_backward(queries[i], keys, values, one == other, mask)
                totals = (_chunk(grad_q[None], i, n)[0], *_chunk(grad_kv, j, n))
                for total, gradient in zip(totals, partial, strict=True):
                    total += gradient
            kv = _receive(incoming, kv)
            # After the last step the gradients are back on the rank of their keys and values.
            grad_kv = _receive(_send_to_next(grad_kv, shards, group), grad_kv)
        grad_k, grad_v = grad_kv.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None


def _visible_chunks(
    shards: SequenceShards, step: int, size: int, window: int | None
) -> list[tuple[int, int, int, int]]:
    """Return the pairs of this rank's query chunks and the key chunks present at ``step`` that are not fully
    masked, each as chunk indices on the rank, then in the sequence. Chunks have ``size`` tokens."""
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
    """Build the additive mask (B or 1, 1, P, P) of documents and window for the queries ``q`` (B, H, P, E) of
    chunk ``one`` and the keys of chunk ``other``; None if causal masking suffices."""
    size = q.shape[2]
    after = (one - other) * size  # distance in tokens from the first key to the first query
    if window is not None and after + size <= window:
        window = None
    if documents is None and window is None:
        return None
    same = torch.ones(1, 1, size, size, dtype=torch.bool, device=q.device)
    if documents is not None:
        chunks = documents.chunk(shards.chunks, dim=1)
        same = chunks[one][:, None, :, None] == chunks[other][:, None, None, :]
    if one == other:
        same = same.tril()
    if window is not None:
        same = same.triu(after + 1 - window)
    return torch.zeros_like(same, dtype=q.dtype).masked_fill(~same, _MASKED_SCORE)


def _chunk(tensors: Tensor, index: int, n: int) -> list[Tensor]:
    """Return chunk ``index`` of ``n`` of each (B, S, K, E), transposed for the kernel to (B, K, P, E)."""
    return [x.chunk(n, dim=1)[index].transpose(1, 2) for x in tensors]


def _send_to_next(x: Tensor, shards: SequenceShards, group: dist.ProcessGroup) -> Tensor:
    """Start sending ``x`` to the next rank and receiving from the previous one. Returns the flat buffer."""
    sent, received = [0] * shards.size, [0] * shards.size
    sent[(shards.rank + 1) % shards.size] = x.numel()
    received[(shards.rank - 1) % shards.size] = x.numel()
    return start_all_to_all(x.flatten(), received, sent, group.group_name)


def _receive(incoming: Tensor, like: Tensor) -> Tensor:
    return incoming if incoming is like else wait(incoming).view(like.shape)


def _combine(sums: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine two partial results, and log-sum-exps (B, H, P), into the softmax over the keys of both."""
    out, lse = new
    if sums is None:
        return out.to(lse.dtype), lse
    before, lse_before = sums
    total = torch.logaddexp(lse_before, lse)
    weights = ((lse_before - total).exp()[..., None], (lse - total).exp()[..., None])
    return before * weights[0] + out * weights[1], total


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the result (B, H, P, E) and its log-sum-exp (B, H, P). ``mask`` includes causal masking."""
    if q.is_cuda:
        return flash_attention(q, k, v, 0.0, causal)[:2]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    causal = causal and mask is None
    return flash_attention_cpu(q, k, v, 0.0, causal, attn_mask=mask)


def _attend_backward(
    queries: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contribution of these keys to the gradients of q, k and v. ``queries`` are q, the result and
    log-sum-exp over all keys, and the gradient of the result."""
    q, out, lse, grad = queries
    if q.is_cuda:
        sizes = (None, None, q.shape[2], k.shape[2])
        # Placeholder RNG state for dropout, which is off.
        random = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device))
        return flash_attention_backward(grad, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, *random)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    grad_q, *grads = flash_attention_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal and mask is None, attn_mask=mask
    )
    grad_k, grad_v = (x.unflatten(1, (-1, group)).sum(2) for x in grads)
    return grad_q, grad_k, grad_v
