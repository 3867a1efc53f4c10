"""torch's varlen_attn: the flash kernel over documents that lie end to end. CUDA, bfloat16 or float16.

Linear memory in the sequence and nothing to compile; head dim a multiple of 8, up to 256. Finding the
documents waits for the device once a forward, for their number is the shape of what the kernel takes.

Shapes: T = B·S tokens, N documents of all rows together.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from toolkit.compat import mark_dynamic
from toolkit.models.common.attention import AttentionBackend

# torch 2.11 has no such argument and takes grouped heads as they are, as the kernel does.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class Documents(NamedTuple):
    """Where the documents begin among all keys and among all queries, and the ends: (N + 1,) int32. No
    row has more keys or queries than these two say. A query sees ``before`` keys before its own, or all for
    -1."""

    keys: Tensor
    queries: Tensor
    most_keys: int
    most_queries: int
    before: int


class VarlenAttention(AttentionBackend):
    """All rows as one sequence of T tokens, in which a row begins a document as a new id does."""

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Documents:
        if documents_BS is None:
            keys = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
        else:
            keys = document_bounds(documents_BS[:, :length])
        queries = query_bounds(keys, length, first) if first else keys
        # One graph of a compiled block for any number of documents; for the same reason the row's length
        # stands in for the longest document's.
        mark_dynamic(keys, 0)
        mark_dynamic(queries, 0)
        return Documents(keys, queries, length, length - first, (self.reach(length) or 0) - 1)

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Documents) -> Tensor:
        q_THE, k_TKE, v_TKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
        keys, queries, most_keys, most_queries, before = mask
        # The last query of a document is at its last key: the kernel aligns them there.
        out_THE = varlen_attn(
            q_THE, k_TKE, v_TKE, queries, keys, most_queries, most_keys, window_size=(before, 0), **_GROUPED
        )
        assert isinstance(out_THE, Tensor)  # a pair where more is asked for
        return out_THE.unflatten(0, q_BSHE.shape[:2])


def document_bounds(documents_BS: Tensor) -> Tensor:
    """Where the runs of equal ids of all rows, laid end to end, begin, and the end: (N + 1,) int32."""
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    begins_N = begins_BS.flatten().nonzero().flatten()
    return torch.nn.functional.pad(begins_N, (0, 1), value=documents_BS.numel()).to(torch.int32)


def query_bounds(keys: Tensor, length: int, first: int) -> Tensor:
    """The bounds ``keys`` of rows of ``length`` tokens, counted in tokens from ``first`` of each row on."""
    row, place = keys // length, keys % length
    return (row * (length - first) + (place - first).clamp(min=0)).to(torch.int32)
