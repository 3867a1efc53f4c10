"""A model's matrices in the layout in which a CPU multiplies them, in place of rows, and fewer of them.

oneDNN reorders a matrix of bf16 in each call, which for a few rows of input costs as much as the product, and
in fp32 torch takes another library's product, slower on some processors: with matrices reordered once a
product takes about half the time in either (benchmarks/LOG.md). Products of the same input are one: queries,
keys and values, and the two of the feed-forward. The operations are those that torch's compiler uses for
frozen weights on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.compat import linear_of_reordered, onednn_has_bf16, reorder_linear_weight
from toolkit.models.common.attention import AttentionMask
from toolkit.models.common.decoder import Attention, Decoder, FeedForward
from toolkit.models.common.lm_head import OutputHead
from toolkit.models.common.rope import rotate

_ROWS = 8
"""Rows of inputs for which the layout is chosen; others are multiplied too."""
Packed = tuple[Tensor, Tensor | None]
"""A reordered matrix, and the bias of its products if there is one."""


def can_pack(model: Decoder) -> bool:
    """Say if ``model`` has plain tensors in fp32 or bf16, not packed yet, on a CPU that oneDNN multiplies on:
    bf16 where there are instructions for it."""
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    plain &= all(module.weight is not None for module in model.modules() if isinstance(module, nn.Linear))
    first = next(model.parameters())
    return (
        plain
        and first.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and (first.dtype == torch.float32 or (first.dtype == torch.bfloat16 and onednn_has_bf16()))
    )


@torch.no_grad()
def pack(model: Decoder) -> None:
    """Reorder the matrices of ``model`` in place: its forward stays, without gradients, and its blocks lose
    their matrices. The head keeps its own beside the reordered copy, for losses and a tied embedding. A
    subclass of nn.Linear, which may compute otherwise, is left as it is."""
    for block in model.layers.values():
        for module in block.modules():
            if type(module) is Attention and module.adapter is None:  # which may use wk by itself
                _join(_PackedAttention, module, module.wq, module.wk, module.wv)
            elif type(module) is FeedForward:
                _join(_PackedFeedForward, module, module.w1, module.w3)
        for module in block.modules():
            if type(module) is nn.Linear and module.weight is not None:
                _become(_PackedLinear, module, module)
    if model.output is not None:
        _pack_head(model.output, model)


def _reordered(weight: Tensor) -> Tensor:
    return reorder_linear_weight(weight.detach(), _ROWS)


def _product(x: Tensor, packed: Packed) -> Tensor:
    return linear_of_reordered(x, *packed, "none", [], "")


def _join(kind: type[nn.Module], module: Any, *linears: nn.Linear) -> None:
    """Compute those of ``linears`` at once, if all are plain."""
    if all(type(linear) is nn.Linear for linear in linears):
        _become(kind, module, *linears)


def _become(kind: type[nn.Module], module: Any, *linears: nn.Linear) -> None:
    """Give ``module`` one reordered matrix and bias of those of ``linears``, which lose theirs."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    packed = _reordered(torch.cat([linear.weight for linear in linears]))
    module.packed = packed, torch.cat(biases) if biases else None
    for linear in linears:
        linear.register_parameter("weight", None)
        linear.register_parameter("bias", None)
    module.__class__ = kind


class _PackedLinear(nn.Linear):
    """A linear layer that has its matrix in oneDNN's order alone."""

    packed: Packed

    def forward(self, input: Tensor) -> Tensor:
        return _product(input, self.packed)


class _PackedAttention(Attention):
    """Attention of which queries, keys and values are one product, and rotated in one operation."""

    packed: Packed

    def forward(self, x_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        heads_BSHE = _product(x_BSD, self.packed).unflatten(-1, (-1, self.head_dim))
        keys = self.wk.out_features // self.head_dim
        queries = heads_BSHE.shape[2] - 2 * keys
        turned_BSHE, v_BSKE = heads_BSHE.split([queries + keys, keys], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHE, k_BSKE = turned_BSHE.split([queries, keys], dim=2)
            turned_BSHE = torch.cat((self.q_norm(q_BSHE), self.k_norm(k_BSKE)), dim=2)
        q_BSHE, k_BSKE = rotate(turned_BSHE, rotations).split([queries, keys], dim=2)
        return self.attended(q_BSHE, k_BSKE, v_BSKE, mask)


class _PackedFeedForward(FeedForward):
    """A feed-forward whose input is multiplied once."""

    packed: Packed

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = _product(x_BSD, self.packed).chunk(2, dim=-1)
        return self.w2(F.silu(gate_BSF).mul_(up_BSF))


def _pack_head(head: OutputHead, model: Decoder) -> None:
    tied = model.tok_embeddings.weight if model.args.tie_embeddings and model.tok_embeddings else head.weight
    assert tied is not None
    packed = _reordered(tied), None
    head.logits = lambda h, weight: _product(h, packed)
