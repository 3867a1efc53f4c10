"""A slow kernel for torch's varlen_attn on the CPU, where torch has none, to run all of ours around it."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn.attention import varlen


@functools.cache
def give_varlen_a_cpu_kernel() -> None:
    """For the rest of the process."""
    varlen._varlen_attn.register_kernel("cpu", _forward)
    varlen._varlen_attn_backward.register_kernel("cpu", _backward)


def _probabilities(
    q_THE: Tensor,
    k_TKE: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    most_q: int,
    most_k: int,
    window: list[int],
) -> Tensor:
    """Softmax (H, Q, K) of the queries' scores with the keys of their document, as the window allows: the
    last query of a document is at its last key, and a document may have no query."""
    for bounds, tokens, most in ((q_bounds, q_THE, most_q), (k_bounds, k_TKE, most_k)):
        assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == len(tokens)
        assert (bounds.diff() >= 0).all() and most >= bounds.diff().max()
    queries, keys = torch.arange(len(q_THE)), torch.arange(len(k_TKE))
    query_document = torch.searchsorted(q_bounds, queries, right=True)
    key_document = torch.searchsorted(k_bounds, keys, right=True)
    seen = query_document[:, None] == key_document
    # Counted from the ends of their document, which queries and keys have in common.
    query_place = (queries - q_bounds[query_document])[:, None]
    key_place = keys - k_bounds[key_document]
    if window[0] != -1:
        seen &= query_place - key_place <= window[0]
    if window[1] != -1:
        seen &= key_place - query_place <= window[1]
    k_THE = k_TKE.repeat_interleave(q_THE.shape[1] // k_TKE.shape[1], dim=1)
    scores = torch.einsum("qhe,khe->hqk", q_THE, k_THE) / math.sqrt(q_THE.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1)


def _forward(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None,
             window_size=None, *_):  # fmt: skip
    assert is_causal == (window_size == [-1, 0]) and window_size[1] == 0 and scale is None
    p = _probabilities(query, key, cu_seq_q, cu_seq_k, max_q, max_k, window_size)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    out = torch.einsum("hqk,khe->qhe", p, value).contiguous()
    return out, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def _backward(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state,
              scale=None, window_size=None):  # fmt: skip
    """dS = P (dP - rowsum(dP P)), and the sums over the query heads that share a key head."""
    group = query.shape[1] // key.shape[1]
    p = _probabilities(query, key, cu_seq_q, cu_seq_k, max_q, max_k, window_size)
    dp = torch.einsum("qhe,khe->hqk", grad_out, value.repeat_interleave(group, dim=1))
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
    dq = torch.einsum("hqk,khe->qhe", ds, key.repeat_interleave(group, dim=1))
    dk = torch.einsum("hqk,qhe->khe", ds, query).unflatten(1, (-1, group)).sum(2)
    dv = torch.einsum("hqk,qhe->khe", p, grad_out).unflatten(1, (-1, group)).sum(2)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()
