"""torch's scaled_dot_product_attention, and the dense masks that it needs.

Shapes: B batch, S sequence, P learned tokens, H heads, K key/value heads (H a multiple of K), E head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from toolkit.models.common.attention import AttentionBackend, Prefix


class SDPA(AttentionBackend):
    """torch's scaled_dot_product_attention: runs on any device; documents and windows use a dense mask.

    With sinks, all scores are stored, because torch's function returns no log-sum-exp.
    """

    takes_padding = takes_sinks = True

    def mask(
        self, documents_BS: Tensor | None, rows: int, length: int, device: torch.device, *, first: int = 0
    ) -> Tensor | None:
        documents_BS = self.within_chunks(documents_BS, rows, length, device)
        if documents_BS is None:
            return causal_mask(length, device, first, self.reach(length))
        return attention_mask(documents_BS[:, :length], first, self.reach(length))

    def __call__(
        self,
        q_BSHE: Tensor,
        k_BSKE: Tensor,
        v_BSKE: Tensor,
        mask: Tensor | None,
        prefix: Prefix | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        if prefix is not None:
            mask = prefix_mask(mask, q_BSHE.shape[1], k_BSKE.shape[1], len(prefix[0]), q_BSHE.device)
            k_BSKE, v_BSKE = (
                torch.cat([x_PKE.to(x.dtype).expand(len(x), -1, -1, -1), x], dim=1)
                for x_PKE, x in zip(prefix, (k_BSKE, v_BSKE), strict=True)
            )
        if sinks_H is not None:
            mask = prefix_mask(mask, q_BSHE.shape[1], k_BSKE.shape[1], 0, q_BSHE.device)
            q_BHSE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
            return attend_with_sinks(q_BHSE, k_BKSE, v_BKSE, mask, sinks_H).transpose(1, 2)
        return sdpa(q_BSHE, k_BSKE, v_BSKE, mask)


def attend_with_sinks(
    q_BHQE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask: Tensor | None, sinks_H: Tensor
) -> Tensor:
    """Compute attention with sinks (H,) from all scores, (B, H, Q, E); ``mask`` broadcasts to (B, 1, Q, S).

    The softmax is computed in at least fp32, over the scores and one column for the sink, without a value.
    """
    q_BKGQE = q_BHQE.unflatten(1, (k_BKSE.shape[1], -1))
    scores_BKGQS = q_BKGQE @ k_BKSE.mT[:, :, None] * q_BHQE.shape[-1] ** -0.5
    if mask is not None:
        scores_BKGQS = scores_BKGQS.masked_fill(~mask.unsqueeze(-3), -torch.inf)
    scores_BKGQS = scores_BKGQS.to(torch.promote_types(scores_BKGQS.dtype, torch.float32))
    sinks_KG11 = sinks_H.to(scores_BKGQS.dtype).view(*q_BKGQE.shape[1:3], 1, 1)
    sinks_BKGQ1 = sinks_KG11.expand(*scores_BKGQS.shape[:-1], 1)
    weights_BKGQS = torch.cat([scores_BKGQS, sinks_BKGQ1], dim=-1).softmax(-1)[..., :-1]
    return (weights_BKGQS.to(v_BKSE.dtype) @ v_BKSE[:, :, None]).flatten(1, 2)


def attention_mask(documents_BS: Tensor, first: int = 0, window: int | None = None) -> Tensor:
    """Return the mask (B, 1, Q, S) of causal attention within documents, for the Q queries from ``first`` on.

    A query attends to at most the last ``window`` keys. Padding has a document id too: it attends to itself,
    so that no softmax row is empty.
    """
    same_B1QS = documents_BS[:, None, first:, None] == documents_BS[:, None, None, :]
    return _banded(same_B1QS, first, window)


def causal_mask(
    length: int, device: torch.device, first: int = 0, window: int | None = None
) -> Tensor | None:
    """Return the mask of queries from ``first`` on over ``length`` keys; None if torch's is_causal
    suffices."""
    if window is not None:
        return _banded(torch.ones(length - first, length, dtype=torch.bool, device=device), first, window)
    if first == 0:
        return None
    if device.type == "cuda":  # the flash kernel supports this mask, but no dense mask
        return causal_lower_right(length - first, length)
    return torch.ones(length - first, length, dtype=torch.bool, device=device).tril_(first)


def _banded(seen_QS: Tensor, first: int, window: int | None) -> Tensor:
    """Mask out, in place, the keys after each query and before its window."""
    seen_QS.tril_(first)
    return seen_QS if window is None else seen_QS.triu_(first + 1 - window)


def prefix_mask(mask: Tensor | None, queries: int, keys: int, prefix: int, device: torch.device) -> Tensor:
    """Extend ``mask`` (``queries`` × ``keys``) by ``prefix`` leading keys that every query sees."""
    if mask is None or isinstance(mask, CausalBias):
        mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return F.pad(mask, (prefix, 0), value=True)


Kernels = Sequence[SDPBackend]
_FLASH_HEAD_DIM = 256
_GROUPED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)


def sdpa(
    q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: Tensor | None, kernels: Kernels = ()
) -> Tensor:
    """Compute softmax(q kᵀ / √E) v under the mask; each KV head serves H / K query heads.

    On CUDA, ``kernels`` defaults to :func:`cuda_kernels`. Returns the shape of the queries.
    """
    q_BHSE, k_BKSE, v_BKSE = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
    group = q_BHSE.shape[1] // k_BKSE.shape[1]
    if group > 1 and q_BHSE.is_cuda:
        kernels = kernels or cuda_kernels(q_BHSE, k_BKSE, mask)
        if kernels[0] not in _GROUPED:  # a small cost next to the S x S scores that the fallback stores
            k_BKSE, v_BKSE = (torch.repeat_interleave(x, group, dim=1) for x in (k_BKSE, v_BKSE))
    return scaled_dot_product(q_BHSE, k_BKSE, v_BKSE, mask, causal=mask is None, kernels=kernels).transpose(
        1, 2
    )


def scaled_dot_product(
    q_BHSE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    mask: Tensor | None,
    *,
    causal: bool = False,
    kernels: Kernels = (),
) -> Tensor:
    """Call torch's function, on CUDA with ``kernels`` (default: :func:`cuda_kernels`)."""
    context: AbstractContextManager[None] = nullcontext()
    if q_BHSE.is_cuda:
        kernels = kernels or cuda_kernels(q_BHSE, k_BKSE, mask)
        context = sdpa_kernel(list(kernels), set_priority=True)
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    with context:
        return F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )


def cuda_kernels(q_BHSE: Tensor, k_BKSE: Tensor, mask: Tensor | None) -> Kernels:
    """Return the CUDA kernels to use for these inputs, in order of preference.

    On Hopper, torch prefers cuDNN for all inputs. cuDNN is the fastest in training, but takes about 30 ms to
    build a plan for each new length, and its gradients become NaN under masks or at lengths that are not
    multiples of 128 (pytorch issue 196678, cudnn-frontend issues 160 and 1072). It is therefore used only in
    training, for full causal rows whose length is a multiple of 128. Flash handles other rows without a dense
    mask.
    """
    fallback = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    dense = mask is not None and not isinstance(mask, CausalBias)
    if dense or q_BHSE.dtype not in (torch.bfloat16, torch.float16) or q_BHSE.shape[-1] > _FLASH_HEAD_DIM:
        return fallback
    length = q_BHSE.shape[2]
    whole = mask is None and length == k_BKSE.shape[2] and length % 128 == 0
    cudnn = [SDPBackend.CUDNN_ATTENTION] if whole and torch.is_grad_enabled() else []
    return [*cudnn, SDPBackend.FLASH_ATTENTION, *fallback]
