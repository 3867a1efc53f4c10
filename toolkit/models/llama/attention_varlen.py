"""torch's varlen_attn: the flash kernel over documents that lie end to end. CUDA, bfloat16 or float16.

Linear memory in the sequence and nothing to compile; head dim a multiple of 8, up to 256. Finding the
documents waits for the device once a forward, for their number is the shape of what the kernel takes.

Shapes: T = B·S tokens, N documents of all rows together.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_CAUSAL = (-1, 0)
# torch 2.11 has no such argument and takes grouped heads as they are, as the kernel does.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


class Documents(NamedTuple):
    """``bounds`` (N + 1,) int32: the token at which each document begins, and T. None is longer than
    ``longest``."""

    bounds: Tensor
    longest: int


class VarlenAttention:
    """All rows as one sequence of T tokens, in which a row begins a document as a new id does."""

    def mask(self, documents_BS: Tensor | None, h_BSD: Tensor) -> Documents:
        rows, length = h_BSD.shape[:2]
        if documents_BS is None:
            bounds = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=h_BSD.device)
        else:
            bounds = document_bounds(documents_BS)
        # One graph of a compiled block for any number of documents; for the same reason the row's length
        # stands in for the longest document's.
        torch._dynamo.mark_dynamic(bounds, 0)
        return Documents(bounds, length)

    def __call__(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Documents) -> Tensor:
        q_THE, k_TKE, v_TKE = (x.flatten(0, 1) for x in (q_BSHE, k_BSKE, v_BSKE))
        bounds, longest = mask
        out_THE = varlen_attn(
            q_THE, k_TKE, v_TKE, bounds, bounds, longest, longest, window_size=_CAUSAL, **_GROUPED
        )
        assert isinstance(out_THE, Tensor)  # a pair where more is asked for
        return out_THE.unflatten(0, q_BSHE.shape[:2])


def document_bounds(documents_BS: Tensor) -> Tensor:
    """Where the runs of equal ids of all rows, laid end to end, begin, and the end: (N + 1,) int32."""
    begins_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    begins_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    begins_N = begins_BS.flatten().nonzero().flatten()
    return torch.nn.functional.pad(begins_N, (0, 1), value=documents_BS.numel()).to(torch.int32)
