"""A model that generates on a CPU, with reordered matrices (toolkit/cpu/prepacked.py) and fewer of them.

Matmuls of the same input are one: queries, keys and values, and the two of the feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.cpu.prepacked import joined, multiply, reordered, takes
from toolkit.models.common.attention import AttentionMask
from toolkit.models.common.decoder import Attention, Decoder, FeedForward
from toolkit.models.common.lm_head import OutputHead
from toolkit.models.common.rope import rotate


def can_pack(model: Decoder) -> bool:
    """Say if ``model`` has plain tensors in fp32 or bf16, not packed yet, on a CPU that oneDNN multiplies on:
    bf16 where there are instructions for it."""
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    plain &= all(module.weight is not None for module in model.modules() if isinstance(module, nn.Linear))
    first = next(model.parameters())
    return plain and first.device.type == "cpu" and takes(first.dtype)


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


def _replace(block: nn.Module, kind: type[nn.Module], packed: Any) -> None:
    """Put ``packed`` modules in the place of those of this very ``kind`` that can be, which lose theirs."""
    for parent in list(block.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is kind and packed.takes(module):
                setattr(parent, name, packed(module))


def _plain(*linears: nn.Module) -> bool:
    return all(type(linear) is nn.Linear for linear in linears)


class _PackedLinear(nn.Linear):
    """A linear layer that has its matrix in oneDNN's order alone."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = joined(linear)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        return linear.weight is not None

    def forward(self, input: Tensor) -> Tensor:
        return multiply(input, self.packed)


class _PackedAttention(Attention):
    """Attention of which queries, keys and values are one product, and rotated in one operation."""

    def __init__(self, plain: Attention):
        nn.Module.__init__(self)
        self.packed = joined(plain.wq, plain.wk, plain.wv)
        self.keys = plain.wk.out_features // plain.head_dim
        self.backend, self.head_dim, self.adapter = plain.backend, plain.head_dim, None
        self.wo, self.q_norm, self.k_norm = plain.wo, plain.q_norm, plain.k_norm

    @staticmethod
    def takes(plain: Attention) -> bool:
        """An adapter may use wk by itself."""
        return plain.adapter is None and _plain(plain.wq, plain.wk, plain.wv)

    def forward(self, x_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        heads_BSHE = multiply(x_BSD, self.packed).unflatten(-1, (-1, self.head_dim))
        queries = heads_BSHE.shape[2] - 2 * self.keys
        turned_BSHE, v_BSKE = heads_BSHE.split([queries + self.keys, self.keys], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHE, k_BSKE = turned_BSHE.split([queries, self.keys], dim=2)
            turned_BSHE = torch.cat((self.q_norm(q_BSHE), self.k_norm(k_BSKE)), dim=2)
        q_BSHE, k_BSKE = rotate(turned_BSHE, rotations).split([queries, self.keys], dim=2)
        return self.attend(q_BSHE, k_BSKE, v_BSKE, mask)


class _PackedFeedForward(FeedForward):
    """A feed-forward whose input is multiplied once."""

    def __init__(self, plain: FeedForward):
        nn.Module.__init__(self)
        self.packed = joined(plain.w1, plain.w3)
        self.w2 = plain.w2

    @staticmethod
    def takes(plain: FeedForward) -> bool:
        return _plain(plain.w1, plain.w3)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = multiply(x_BSD, self.packed).chunk(2, dim=-1)
        return self.w2(F.silu(gate_BSF).mul_(up_BSF))


def _pack_head(head: OutputHead, model: Decoder) -> None:
    tied = model.tok_embeddings.weight if model.args.tie_embeddings and model.tok_embeddings else head.weight
    assert tied is not None
    packed = reordered(tied), None
    head.logits = lambda h, weight: multiply(h, packed)
