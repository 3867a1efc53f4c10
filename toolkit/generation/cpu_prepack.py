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
        for kind, packed in ((Attention, _PackedAttention), (FeedForward, _PackedFeedForward)):
            _replace(block, kind, packed)
        _replace(block, nn.Linear, _PackedLinear)  # those that are left
    if model.output is not None:
        _pack_head(model.output, model)


def _reordered(weight: Tensor) -> Tensor:
    return reorder_linear_weight(weight.detach(), _ROWS)


def _product(x: Tensor, packed: Packed) -> Tensor:
    return linear_of_reordered(x, *packed, "none", [], "")


def _replace(block: nn.Module, kind: type[nn.Module], packed: Any) -> None:
    """Put ``packed`` modules in the place of those of this very ``kind`` that can be, which lose theirs."""
    for parent in list(block.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is kind and packed.takes(module):
                setattr(parent, name, packed(module))


def _plain(*linears: nn.Module) -> bool:
    return all(type(linear) is nn.Linear for linear in linears)


def _joined(*linears: nn.Linear) -> Packed:
    """One reordered matrix and bias of those of ``linears``."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    packed = _reordered(torch.cat([linear.weight for linear in linears]))
    return packed, torch.cat(biases) if biases else None


class _PackedLinear(nn.Linear):
    """A linear layer that has its matrix in oneDNN's order alone."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = _joined(linear)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        return linear.weight is not None

    def forward(self, input: Tensor) -> Tensor:
        return _product(input, self.packed)


class _PackedAttention(Attention):
    """Attention of which queries, keys and values are one product, and rotated in one operation."""

    def __init__(self, plain: Attention):
        nn.Module.__init__(self)
        self.packed = _joined(plain.wq, plain.wk, plain.wv)
        self.keys = plain.wk.out_features // plain.head_dim
        self.backend, self.head_dim, self.adapter = plain.backend, plain.head_dim, None
        self.wo, self.q_norm, self.k_norm = plain.wo, plain.q_norm, plain.k_norm

    @staticmethod
    def takes(plain: Attention) -> bool:
        """An adapter may use wk by itself."""
        return plain.adapter is None and _plain(plain.wq, plain.wk, plain.wv)

    def forward(self, x_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        heads_BSHE = _product(x_BSD, self.packed).unflatten(-1, (-1, self.head_dim))
        queries = heads_BSHE.shape[2] - 2 * self.keys
        turned_BSHE, v_BSKE = heads_BSHE.split([queries + self.keys, self.keys], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHE, k_BSKE = turned_BSHE.split([queries, self.keys], dim=2)
            turned_BSHE = torch.cat((self.q_norm(q_BSHE), self.k_norm(k_BSKE)), dim=2)
        q_BSHE, k_BSKE = rotate(turned_BSHE, rotations).split([queries, self.keys], dim=2)
        return self.attended(q_BSHE, k_BSKE, v_BSKE, mask)


class _PackedFeedForward(FeedForward):
    """A feed-forward whose input is multiplied once."""

    def __init__(self, plain: FeedForward):
        nn.Module.__init__(self)
        self.packed = _joined(plain.w1, plain.w3)
        self.w2 = plain.w2

    @staticmethod
    def takes(plain: FeedForward) -> bool:
        return _plain(plain.w1, plain.w3)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = _product(x_BSD, self.packed).chunk(2, dim=-1)
        return self.w2(F.silu(gate_BSF).mul_(up_BSF))


def _pack_head(head: OutputHead, model: Decoder) -> None:
    tied = model.tok_embeddings.weight if model.args.tie_embeddings and model.tok_embeddings else head.weight
    assert tied is not None
    packed = _reordered(tied), None
    head.logits = lambda h, weight: _product(h, packed)
