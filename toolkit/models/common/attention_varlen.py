"""torch's varlen_attn: the flash kernel over concatenated documents. CUDA, bfloat16 or float16.

Memory is linear in the sequence length, and nothing is compiled. Head dims are multiples of 8 up to 256.
Finding the documents synchronizes with the device once per forward, because their number is a tensor shape.

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

# torch 2.11 lacks this argument and accepts grouped heads without it.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class Documents(NamedTuple):
    """Offsets (N + 1,) int32 of the documents among all keys and all queries.

    Attributes:
        most_keys: upper bound of the number of keys in a document; most_queries: the same for queries.
        before: number of earlier keys visible to a query; -1 means all.
    """

    keys: Tensor
    queries: Tensor
    most_keys: int
    most_queries: int
    before: int


class VarlenAttention(AttentionBackend):
    """Attention over all rows as one sequence of T tokens; a document begins at each row and each new id."""

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Documents:
        documents_BS = self.within_chunks(documents_BS, rows, length, device)
        if documents_BS is None:
            keys = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
        else:
            keys = document_bounds(documents_BS[:, :length])
        queries = query_bounds(keys, length, first) if first else keys
        # One graph of a compiled block serves any number of documents. For the same reason the maximum is the
        # row length, not the length of the longest document.
        mark_dynamic(keys, 0)
        mark_dynamic(queries, 0)
        return Documents(keys, queries, length, length - first, (self.reach(length) or 0) - 1)

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Documents) -> Tensor:
        q_THE, k_TKE, v_TKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
        keys, queries, most_keys, most_queries, before = mask
        # The kernel aligns the last query of a document with its last key.
        out_THE = varlen_attn(
            q_THE, k_TKE, v_TKE, queries, keys, most_queries, most_keys, window_size=(before, 0), **_GROUPED
        )
        assert isinstance(out_THE, Tensor)  # a tuple only if more outputs are requested
        return out_THE.unflatten(0, q_BSHE.shape[:2])


def document_bounds(documents_BS: Tensor) -> Tensor:
    """Return the offsets of runs of equal ids in the concatenated rows, (N + 1,) int32."""
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    begins_N = begins_BS.flatten().nonzero().flatten()
    return torch.nn.functional.pad(begins_N, (0, 1), value=documents_BS.numel()).to(torch.int32)


def query_bounds(keys: Tensor, length: int, first: int) -> Tensor:
    """Convert offsets of ``keys``, in rows of ``length`` tokens, to offsets among the tokens from ``first``
    on."""
    row, column = keys // length, keys % length
    return (row * (length - first) + (column - first).clamp(min=0)).to(torch.int32)
