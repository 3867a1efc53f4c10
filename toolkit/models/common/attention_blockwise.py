"""Attention on CPUs as plain batched products, a block of queries at a time with just the keys that it sees.

torch's own kernel for CPUs computes far below the rate of its matmul, which these products are (`python -m
benchmarks.attention` times the two). A block's scores, for as many heads as a cache has room for, are made,
normalised and used before those of the next. What causality hides is computed within a block's own columns
alone, and a block begins with the first column that its first query sees, of its document and its window.
Backward has queries, keys
and values alone kept for it and makes the scores again, as flash attention does (Dao et al. 2022,
arXiv:2205.14135).

Scores and weights are rounded to the dtype of the queries, as in transformers' eager attention. Products add
up in fp32 or fp64, and over blocks so do the gradients of keys and values.

Shapes: B rows, Q queries, S keys, of which the last Q are the queries' own, H heads, K key/value heads,
G = H / K, E head dim; a block has N queries, M = G·N rows of scores and W keys, of which the last N are the
queries' own, and some queries see the first L no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from toolkit.models.common.attention import AttentionBackend

_QUERY_BYTES = 256
"""Queries of a block times the bytes of a number: 128 in bfloat16, 64 in fp32. Fewer waste less on what
causality hides, more make wider products, which gain most in bfloat16."""
_SCORE_BYTES = 1 << 20
"""Bytes of scores that are there at once."""


class Blockwise(AttentionBackend):
    """Attention of queries in blocks, for CPUs: any dtype, grouped heads, documents, windows."""

    takes_padding = True

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Tensor | None:
        """The first column (B, Q) that each query sees, of its document and window; None where all begin at
        the first of the row."""
        starts_BQ = None if documents_BS is None else document_starts(documents_BS[:, :length])[:, first:]
        if (window := self.reach(length)) is None:
            return starts_BQ
        window_Q = torch.arange(first, length, device=device).sub_(window - 1).clamp_(min=0)
        return window_Q.expand(rows, -1) if starts_BQ is None else starts_BQ.maximum(window_Q)

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Tensor | None) -> Tensor:
        return attend(q_BSHE, k_BSKE, v_BSKE, mask)


def document_starts(documents_BS: Tensor) -> Tensor:
    """The column (B, S) at which each token's run of equal ids begins, int64."""
    columns_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return (columns_S * begins_BS).cummax(dim=1).values


# Operators of their own: torch.compile leaves the loops alone, and activation checkpointing knows the name.
@torch.library.custom_op("toolkit::blockwise_attention", mutates_args=())
def attend(q_BQHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts_BQ: Tensor | None) -> Tensor:
    """softmax(q kᵀ / √E) v, (B, Q, H, E), over the keys from ``starts_BQ`` on, or all, up to each query's."""
    out_BQHE = torch.empty_like(q_BQHE, memory_format=torch.contiguous_format)
    heads = k_BSKE.shape[2]
    for row in range(len(q_BQHE)):
        q_KGQE, out_KGQE = (_by_key_head(x[row], heads) for x in (q_BQHE, out_BQHE))
        k_KES, v_KSE = _transposed(k_BSKE[row]), v_BSKE[row].transpose(0, 1).contiguous()
        for block in _blocks(q_KGQE, k_KES, None if starts_BQ is None else starts_BQ[row]):
            weights_KMW = block.weights(block.of_queries(q_KGQE), block.columns(k_KES))
            block.write(out_KGQE, torch.bmm(weights_KMW, block.rows(v_KSE)))
    return out_BQHE


@torch.library.custom_op("toolkit::blockwise_attention_backward", mutates_args=())
def attend_backward(
    grad_BQHE: Tensor, q_BQHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts_BQ: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BQHE, k_BSKE, v_BSKE)]
    length, heads, head_dim = k_BSKE.shape[1:]
    scale, precise = head_dim**-0.5, torch.promote_types(q_BQHE.dtype, torch.float32)
    grad_kv_2KES = torch.empty(2, heads, head_dim, length, dtype=precise)
    grad_k_KES, grad_v_KES = grad_kv_2KES
    for row in range(len(q_BQHE)):
        q_KGQE, grad_KGQE, grad_q_KGQE = (_by_key_head(x[row], heads) for x in (q_BQHE, grad_BQHE, grads[0]))
        k_KES, v_KES = _transposed(k_BSKE[row]), _transposed(v_BSKE[row])
        k_KSE = k_BSKE[row].transpose(0, 1).contiguous()
        grad_kv_2KES.zero_()
        for block in _blocks(q_KGQE, k_KES, None if starts_BQ is None else starts_BQ[row]):
            q_KME, grad_KME = block.of_queries(q_KGQE), block.of_queries(grad_KGQE)
            weights_KMW = block.weights(q_KME, block.columns(k_KES))
            block.columns(grad_v_KES).add_(torch.bmm(grad_KME.mT, weights_KMW))
            grad_weights_KMW = torch.bmm(grad_KME, block.columns(v_KES))
            grad_scores_KMW = torch._softmax_backward_data(
                grad_weights_KMW, weights_KMW, -1, weights_KMW.dtype
            )
            block.columns(grad_k_KES).add_(_scaled_product(q_KME.mT, grad_scores_KMW, scale))
            block.write(grad_q_KGQE, _scaled_product(grad_scores_KMW, block.rows(k_KSE), scale))
        for grad_BSKE, grad_KES in zip(grads[1:], (grad_k_KES, grad_v_KES), strict=True):
            grad_BSKE[row].flatten(1).copy_(grad_KES.to(grad_BSKE.dtype).flatten(0, 1).T)
    return grads[0], grads[1], grads[2]


@attend.register_fake
def _(q_BQHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts_BQ: Tensor | None) -> Tensor:
    return torch.empty_like(q_BQHE, memory_format=torch.contiguous_format)


@attend_backward.register_fake
def _(
    grad_BQHE: Tensor, q_BQHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, starts_BQ: Tensor | None
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BQHE, k_BSKE, v_BSKE))


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_BQHE: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return *attend_backward(grad_BQHE, *ctx.saved_tensors), None


attend.register_autograd(_backward, setup_context=_keep_inputs)


class _Block(NamedTuple):
    """Some key heads, some queries of theirs, the keys that these see, and which of the last and of the first
    are hidden from which query, if any of the first is."""

    heads: slice
    queries: slice
    keys: slice
    later_NN: Tensor
    earlier_NL: Tensor | None

    def of_queries(self, x_KGQE: Tensor) -> Tensor:
        """The queries' part as rows of a product, (K, M, E)."""
        return x_KGQE[self.heads, :, self.queries].flatten(1, 2)

    def rows(self, x_KSE: Tensor) -> Tensor:
        """The keys' part, (K, W, E), a view."""
        return x_KSE[self.heads, self.keys]

    def columns(self, x_KES: Tensor) -> Tensor:
        """The keys' part, (K, E, W), a view."""
        return x_KES[self.heads, :, self.keys]

    def write(self, whole_KGQE: Tensor, part_KME: Tensor) -> None:
        """Put the queries' part into the whole."""
        part = whole_KGQE[self.heads, :, self.queries]
        part.copy_(part_KME.view(part.shape))

    def weights(self, q_KME: Tensor, k_KEW: Tensor) -> Tensor:
        """The softmax (K, M, W) of the scores, zero for what is hidden."""
        scores_KMW = _scaled_product(q_KME, k_KEW, q_KME.shape[-1] ** -0.5)
        scores_KGNW = scores_KMW.unflatten(1, (-1, len(self.later_NN)))
        scores_KGNW[..., -len(self.later_NN) :].masked_fill_(self.later_NN, float("-inf"))
        if self.earlier_NL is not None:
            scores_KGNW[..., : self.earlier_NL.shape[1]].masked_fill_(self.earlier_NL, float("-inf"))
        return torch.softmax(scores_KMW, dim=-1)


def _blocks(q_KGQE: Tensor, k_KES: Tensor, starts_Q: Tensor | None) -> Iterator[_Block]:
    """The blocks of one row, whose queries are the last of its keys."""
    heads, group, queries, _ = q_KGQE.shape
    first, size = k_KES.shape[2] - queries, q_KGQE.itemsize
    for begin in range(0, queries, _QUERY_BYTES // size):
        end = min(begin + _QUERY_BYTES // size, queries)
        keys = slice(0 if starts_Q is None else int(starts_Q[begin]), first + end)
        own_N = torch.arange(first + begin, first + end)[:, None]
        later_NN, earlier_NL = own_N < own_N.T, None
        if starts_Q is not None and int(starts_Q[end - 1]) > keys.start:
            earlier_NL = torch.arange(keys.start, int(starts_Q[end - 1])) < starts_Q[begin:end, None]
        at_once = max(1, _SCORE_BYTES // (size * group * (end - begin) * (keys.stop - keys.start)))
        for head in range(0, heads, at_once):
            yield _Block(slice(head, head + at_once), slice(begin, end), keys, later_NN, earlier_NL)


def _by_key_head(x_QHE: Tensor, heads: int) -> Tensor:
    """The view (K, G, Q, E)."""
    return x_QHE.unflatten(1, (heads, -1)).permute(1, 2, 0, 3)


def _transposed(x_SKE: Tensor) -> Tensor:
    """A copy (K, E, S), of two dimensions when it is made, for which torch has a fast path."""
    return x_SKE.flatten(1).T.contiguous().unflatten(0, x_SKE.shape[1:])


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · a b of batches of matrices."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)
