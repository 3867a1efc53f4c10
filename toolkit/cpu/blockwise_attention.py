"""Attention on CPUs by batched matmuls, one block of queries at a time, with only the keys that the block
attends to.

torch's attention kernel for CPUs is far slower than its matmul (`python -m benchmarks.attention` times both).
The scores of a block, for as many heads as fit in a cache, are computed, normalized and used before those of
the next block. Masked scores are computed only within a block's own columns. A block's keys begin at the
first token that its first query attends to, given document and window. Short rows share one matmul. Backward
saves only queries, keys and values, and recomputes the scores, as flash attention does (Dao et al. 2022,
arXiv:2205.14135). On CPUs with AMX, torch's kernel is used for the forward of full rows, where it is faster.

Scores and attention weights are rounded to the dtype of the queries, as in transformers' eager attention.
Matmuls, and the sums of key and value gradients over blocks, accumulate in fp32 or fp64.

An attention sink, one logit per head in the denominator of the softmax (arXiv:2309.17453), is one more column
of scores, without key and value.

Shapes: B rows, R of them at a time; Q queries; S keys, the last Q of which belong to the queries; H heads, K
key/value heads, G = H / K; E head dim. A block has N pairs of row and KV head, Q queries of its own, M = G·Q
rows of scores, and W keys, the last Q of which belong to its queries. L is the number of its first keys that
some of its queries no longer attend to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.compat import softmax_backward

_QUERY_BYTES = 256
"""Bytes per block of queries, for one element of each: 128 queries in bfloat16, 64 in fp32. Smaller blocks
compute fewer masked scores; larger ones have wider matmuls, which are faster, especially in bfloat16."""
_SCORE_BYTES = 1 << 21
"""Maximum bytes of scores in memory at a time, per thread."""


@cache
def has_tiles() -> bool:
    """Return whether this CPU has bfloat16 tile matmuls (AMX), which torch's attention then uses."""
    return bool(torch.cpu.get_capabilities().get("amx_tile"))


def document_starts(documents_BS: Tensor) -> Tensor:
    """Return the column (B, S) at which each token's run of equal ids begins, int64."""
    columns_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return (columns_S * begins_BS).cummax(dim=1).values


# Custom operators: torch.compile does not trace the loops, and activation checkpointing recognizes the name.
@torch.library.custom_op("toolkit::blockwise_attention", mutates_args=())
def attend(
    q_BQHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts_BQ: Tensor | None, sinks_H: Tensor | None = None
) -> Tensor:
    """Compute softmax(q kᵀ / √E) v, (B, Q, H, E), with sinks if any; each query attends to the keys from its
    start in ``starts_BQ`` (None: the first) up to its own."""
    whole = starts_BQ is None and sinks_H is None and q_BQHE.shape[1] == k_BSKE.shape[1]
    if whole and q_BQHE.dtype == torch.bfloat16 and has_tiles():
        q_BHQE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BQHE, k_BSKE, v_BSKE))
        out_BHQE = F.scaled_dot_product_attention(q_BHQE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=True)
        return out_BHQE.transpose(1, 2).contiguous()
    out_BQHE = torch.empty_like(q_BQHE, memory_format=torch.contiguous_format)
    heads = k_BSKE.shape[2]
    for rows in _rows_at_once(q_BQHE, k_BSKE):
        q_RKGQE, out_RKGQE = (_by_key_head(x[rows], heads) for x in (q_BQHE, out_BQHE))
        k_RKES, v_RKSE = _transposed(k_BSKE[rows]), v_BSKE[rows].transpose(1, 2).contiguous()
        for block in _blocks(q_RKGQE, k_RKES, None if starts_BQ is None else starts_BQ[rows]):
            weights_NMW = block.weights(block.of_queries(q_RKGQE), block.columns(k_RKES), sinks_H)
            weights_NMW = weights_NMW[..., : block.width]
            block.write(out_RKGQE, torch.bmm(weights_NMW, block.rows(v_RKSE)))
            del weights_NMW  # freed before the next block allocates its own
    return out_BQHE


@torch.library.custom_op("toolkit::blockwise_attention_backward", mutates_args=())
def attend_backward(
    grad_BQHE: Tensor,
    q_BQHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    starts_BQ: Tensor | None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys, values and sinks, the latter empty if there are none."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BQHE, k_BSKE, v_BSKE)]
    heads, head_dim = k_BSKE.shape[2:]
    scale, precise = head_dim**-0.5, torch.promote_types(q_BQHE.dtype, torch.float32)
    grad_sinks_KG = torch.zeros(() if sinks_H is None else (heads, len(sinks_H) // heads), dtype=precise)
    for rows in _rows_at_once(q_BQHE, k_BSKE):
        given = (x[rows] for x in (q_BQHE, grad_BQHE, grads[0]))
        q_RKGQE, grad_RKGQE, grad_q_RKGQE = (_by_key_head(x, heads) for x in given)
        k_RKES, v_RKES = _transposed(k_BSKE[rows]), _transposed(v_BSKE[rows])
        k_RKSE = k_BSKE[rows].transpose(1, 2).contiguous()
        grad_k_RKES, grad_v_RKES = torch.zeros(2, *k_RKES.shape, dtype=precise)
        for block in _blocks(q_RKGQE, k_RKES, None if starts_BQ is None else starts_BQ[rows]):
            q_NME, grad_NME = block.of_queries(q_RKGQE), block.of_queries(grad_RKGQE)
            all_NMW = block.weights(q_NME, block.columns(k_RKES), sinks_H)
            weights_NMW = all_NMW[..., : block.width]
            block.columns(grad_v_RKES).add_(torch.bmm(grad_NME.mT, weights_NMW))
            grad_all_NMW = torch.empty_like(all_NMW)
            grad_all_NMW[..., block.width :] = 0  # no value depends on a sink's weight
            grad_scores_NMW = grad_all_NMW[..., : block.width]  # of weights, then in place
            torch.bmm(grad_NME, block.columns(v_RKES), out=grad_scores_NMW)
            softmax_backward(grad_all_NMW, all_NMW, -1, all_NMW.dtype, grad_input=grad_all_NMW)
            if sinks_H is not None:
                grad_sinks_KG[block.heads] += block.of_sinks(grad_all_NMW).sum((0, 3), dtype=precise)
            block.columns(grad_k_RKES).add_(_scaled_product(q_NME.mT, grad_scores_NMW, scale))
            block.write(grad_q_RKGQE, _scaled_product(grad_scores_NMW, block.rows(k_RKSE), scale))
            # Freed before the next block allocates its own.
            del all_NMW, weights_NMW, grad_all_NMW, grad_scores_NMW
        for grad_BSKE, grad_RKES in zip(grads[1:], (grad_k_RKES, grad_v_RKES), strict=True):
            grad_BSKE[rows].flatten(2).copy_(grad_RKES.to(grad_BSKE.dtype).flatten(1, 2).mT)
    grad_sinks = q_BQHE.new_empty(0) if sinks_H is None else grad_sinks_KG.flatten().to(sinks_H.dtype)
    return grads[0], grads[1], grads[2], grad_sinks


@attend.register_fake
def _(
    q_BQHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts_BQ: Tensor | None, sinks_H: Tensor | None = None
) -> Tensor:
    return torch.empty_like(q_BQHE, memory_format=torch.contiguous_format)


@attend_backward.register_fake
def _(
    grad_BQHE: Tensor,
    q_BQHE: Tensor,
    k_BSKE: Tensor,
    v_BSKE: Tensor,
    starts_BQ: Tensor | None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, ...]:
    made = q_BQHE, k_BSKE, v_BSKE, q_BQHE.new_empty(0) if sinks_H is None else sinks_H
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in made)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_BQHE: Tensor) -> tuple[Tensor | None, ...]:
    *_, sinks_H = saved = ctx.saved_tensors  # once: a checkpoint hands out each tensor once
    *grads, grad_sinks = attend_backward(grad_BQHE, *saved)
    return *grads, None, None if sinks_H is None else grad_sinks


attend.register_autograd(_backward, setup_context=_keep_inputs)


class _Block(NamedTuple):
    """Some KV heads of R rows, a range of their queries, and the keys that these attend to. Masks are added
    to the scores of the last keys and, if any is hidden, of the first keys: −∞ where a query must not see a
    key."""

    heads: slice
    queries: slice
    keys: slice
    later_QQ: Tensor
    earlier_R11QL: Tensor | None

    def of_queries(self, x_RKGQE: Tensor) -> Tensor:
        """Return the block's slice of a tensor of queries, as rows for a matmul, (N, M, E)."""
        return x_RKGQE[:, self.heads, :, self.queries].flatten(2, 3).flatten(0, 1)

    def rows(self, x_RKSE: Tensor) -> Tensor:
        """Return the block's slice of a tensor of keys, (N, W, E), as a view."""
        return x_RKSE[:, self.heads, self.keys].flatten(0, 1)

    def columns(self, x_RKES: Tensor) -> Tensor:
        """Return the block's slice of a transposed tensor of keys, (N, E, W), as a view."""
        return x_RKES[:, self.heads, :, self.keys].flatten(0, 1)

    def write(self, whole_RKGQE: Tensor, part_NME: Tensor) -> None:
        """Copy the block's result into its slice of the full tensor."""
        part = whole_RKGQE[:, self.heads, :, self.queries]
        part.copy_(part_NME.view(part.shape))

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.keys.stop - self.keys.start

    def of_sinks(self, all_NMW: Tensor) -> Tensor:
        """Return the last column of a tensor of scores, as a view (R, K, G, Q)."""
        column_NGQ = all_NMW[..., -1].unflatten(1, (-1, len(self.later_QQ)))
        return column_NGQ.unflatten(0, (-1, self.heads.stop - self.heads.start))

    def weights(self, q_NME: Tensor, k_NEW: Tensor, sinks_H: Tensor | None) -> Tensor:
        """Return the softmax (N, M, W) of the scores, 0 where masked; with sinks (N, M, W + 1), whose last
        column is the sink's."""
        all_NMW = q_NME.new_empty(*q_NME.shape[:2], self.width + (sinks_H is not None))
        scores_NMW = all_NMW[..., : self.width]
        torch.baddbmm(scores_NMW, q_NME, k_NEW, beta=0, alpha=q_NME.shape[-1] ** -0.5, out=scores_NMW)
        if sinks_H is not None:
            column_RKGQ = self.of_sinks(all_NMW)
            column_RKGQ.copy_(sinks_H.view(-1, column_RKGQ.shape[2], 1)[self.heads])
        scores_NGQW = scores_NMW.unflatten(1, (-1, len(self.later_QQ)))
        scores_NGQW[..., -len(self.later_QQ) :].add_(self.later_QQ)
        if self.earlier_R11QL is not None:
            of_first = scores_NGQW[..., : self.earlier_R11QL.shape[-1]]
            of_first.unflatten(0, (len(self.earlier_R11QL), -1)).add_(self.earlier_R11QL)
        return torch.softmax(all_NMW, dim=-1)


def _score_bytes() -> int:
    return _SCORE_BYTES * torch.get_num_threads()


def _rows_at_once(q_BQHE: Tensor, k_BSKE: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each at least one row and as many as keep the scores of a block of queries and
    all heads within the limit."""
    rows, queries, heads, _ = q_BQHE.shape
    size = heads * min(queries, _QUERY_BYTES // q_BQHE.itemsize) * k_BSKE.shape[1] * q_BQHE.itemsize
    step = max(1, _score_bytes() // size)
    return (slice(first, first + step) for first in range(0, rows, step))


def _blocks(q_RKGQE: Tensor, k_RKES: Tensor, starts_RQ: Tensor | None) -> Iterator[_Block]:
    """Yield the blocks of some rows, whose queries belong to the last keys."""
    rows, heads, group, queries, _ = q_RKGQE.shape
    first, size, hidden = k_RKES.shape[-1] - queries, q_RKGQE.itemsize, float("-inf")
    of_block = min(queries, _QUERY_BYTES // size)
    later_QQ = q_RKGQE.new_full((of_block, of_block), hidden).triu_(1)
    for begin in range(0, queries, of_block):
        end, start, earlier_R11QL = min(begin + of_block, queries), 0, None
        if starts_RQ is not None:
            start, last = int(starts_RQ[:, begin].min()), int(starts_RQ[:, end - 1].max())
            if last > start:
                earlier = torch.arange(start, last) < starts_RQ[:, None, None, begin:end, None]
                earlier_R11QL = q_RKGQE.new_zeros(earlier.shape).masked_fill_(earlier, hidden)
        keys, own_QQ = slice(start, first + end), later_QQ[: end - begin, : end - begin]
        of_head = size * rows * group * (end - begin) * (keys.stop - start)
        at_once = max(1, _score_bytes() // of_head)
        for head in range(0, heads, at_once):
            key_heads = slice(head, min(head + at_once, heads))
            yield _Block(key_heads, slice(begin, end), keys, own_QQ, earlier_R11QL)


def _by_key_head(x_RQHE: Tensor, heads: int) -> Tensor:
    """Return the view (R, K, G, Q, E)."""
    return x_RQHE.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)


def _transposed(x_RSKE: Tensor) -> Tensor:
    """Return a transposed copy (R, K, E, S), made row by row as a 2-D transpose, for which torch has a fast
    path."""
    out_RKES = x_RSKE.new_empty(*(x_RSKE.shape[dim] for dim in (0, 2, 3, 1)))
    for out_KES, x_SKE in zip(out_RKES, x_RSKE, strict=True):
        out_KES.flatten(0, 1).copy_(x_SKE.flatten(1).T)
    return out_RKES


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute scale · a b for batches of matrices."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)
