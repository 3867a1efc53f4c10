"""FlexAttention (Dong et al. 2024, arXiv:2412.05496): a fused kernel that skips fully masked blocks.

Memory is linear in the sequence length. Any dtype is supported, with head dims of at least 16. torch.compile
generates the kernel on the first step, and again for each new shape. On CPU it computes all scores and has no
backward, so it is for tests only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from toolkit.compat import higher_order_wrap
from toolkit.models.common.attention import AttentionBackend

# Selective checkpointing can save the output of a wrapped compiled region; unwrapped, it is recomputed.
# Without this class, wrapping fails with flex_attention (torchtitan issue 2463).
_OPTIONS: dict[str, Any] = (
    {"wrap_inductor_compiled_regions": True} if hasattr(higher_order_wrap, "InductorCompiledCallable") else {}
)

# For fewer than 128 queries torch chooses a decoding kernel, which does not exist for grouped heads and more
# than a few queries ("No choices exist for backend", torch 2.11 on an H100).
_KERNEL_OPTIONS: Any = {"BACKEND": "TRITON"}


class FlexAttention(AttentionBackend):
    """torch's flex_attention with a mask of 128 x 128 blocks."""

    takes_sinks = True

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> BlockMask:
        documents_BS = self.within_chunks(documents_BS, rows, length, device)
        window = self.reach(length)

        def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            seen = query + first >= key
            return seen if window is None else seen & (query + first < key + window)

        def within_document(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            assert documents_BS is not None
            same = documents_BS[row, query + first] == documents_BS[row, key]
            return causal(row, head, query, key) & same

        # When compiled, it does not materialize a boolean for every pair.
        make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
        if documents_BS is None:
            return make(causal, None, None, length - first, length, device=device)
        return make(within_document, rows, None, length - first, length, device=device)

    def __call__(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: BlockMask, sinks_H: Tensor | None = None
    ) -> Tensor:
        q_BHSE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        flex: Callable[..., Any] = flex_attention
        if q_BHSE.is_cuda and not torch.compiler.is_compiling():  # a compiled block already contains it
            flex = _compiled(flex_attention)
        found = flex(
            q_BHSE, k_BKSE, v_BKSE, block_mask=mask, enable_gqa=q_BHSE.shape[1] != k_BKSE.shape[1],
            kernel_options=_KERNEL_OPTIONS if q_BHSE.is_cuda else None,
            return_aux=None if sinks_H is None else AuxRequest(lse=True),
        )  # fmt: skip
        if sinks_H is None:
            return found.transpose(1, 2)
        # The sink multiplies the denominator exp(lse) by 1 + exp(sink - lse). Both gradients pass the lse.
        out_BHSE, aux = found
        kept_BHS = torch.sigmoid(aux.lse - sinks_H[:, None])
        return (out_BHSE * kept_BHS[..., None].to(out_BHSE.dtype)).transpose(1, 2)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled ``function``, shared by all blocks."""
    return torch.compile(function, dynamic=False, options=_OPTIONS)
