"""Prepack a model's weights for generation on a CPU (toolkit/cpu/prepacked.py) and fuse matmuls.

The query, key and value projections become one matmul, as do w1 and w3 of the feed-forward.
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


def can_prepack(model: Decoder) -> bool:
    """Report whether ``model`` is on a CPU with oneDNN, is not prepacked yet, and has unmodified parameters
    in fp32, or in bf16 with native instructions."""
    plain = all(type(parameter) is nn.Parameter for parameter in model.parameters())
    plain &= all(module.weight is not None for module in model.modules() if isinstance(module, nn.Linear))
    first = next(model.parameters())
    return plain and first.device.type == "cpu" and takes(first.dtype)


@torch.no_grad()
def prepack_model(model: Decoder) -> None:
    """Prepack ``model`` in place for forwards without gradients; its blocks lose their original weights.

    The head keeps its weight in addition to the reordered copy, for losses and a tied embedding. Subclasses
    of nn.Linear are unchanged.
    """
    for block in model.layers.values():
        for kind, packed in ((Attention, _PackedAttention), (FeedForward, _PackedFeedForward)):
            _replace(block, kind, packed)
        _replace(block, nn.Linear, _PackedLinear)  # the remaining linear layers
    if model.output is not None:
        _pack_head(model.output, model)


def _replace(block: nn.Module, kind: type[nn.Module], packed: Any) -> None:
    """Replace modules of exactly this ``kind`` by ``packed`` ones where possible."""
    for parent in list(block.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is kind and packed.accepts(module):
                setattr(parent, name, packed(module))


def _are_plain(*linears: nn.Module) -> bool:
    return all(type(linear) is nn.Linear for linear in linears)


class _PackedLinear(nn.Linear):
    """A linear layer with only a reordered weight."""

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = joined(linear)
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    @staticmethod
    def accepts(linear: nn.Linear) -> bool:
        return linear.weight is not None

    def forward(self, input: Tensor) -> Tensor:
        return multiply(input, self.packed)


class _PackedAttention(Attention):
    """Attention with one matmul for queries, keys and values, and one rotation."""

    def __init__(self, plain: Attention):
        nn.Module.__init__(self)
        self.packed = joined(plain.wq, plain.wk, plain.wv)
        self.keys = plain.wk.out_features // plain.head_dim
        self.backend, self.head_dim, self.adapter = plain.backend, plain.head_dim, None
        self.rope, self.norm_eps = plain.rope, plain.norm_eps
        self.wo, self.q_norm, self.k_norm, self.sinks = plain.wo, plain.q_norm, plain.k_norm, plain.sinks

    @staticmethod
    def accepts(plain: Attention) -> bool:
        """Report whether there is no adapter, because an adapter may use wk directly."""
        return plain.adapter is None and _are_plain(plain.wq, plain.wk, plain.wv)

    def forward(self, x_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        heads_BSHE = multiply(x_BSD, self.packed).unflatten(-1, (-1, self.head_dim))
        queries = heads_BSHE.shape[2] - 2 * self.keys
        qk_BSHE, v_BSKE = heads_BSHE.split([queries + self.keys, self.keys], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHE, k_BSKE = qk_BSHE.split([queries, self.keys], dim=2)
            qk_BSHE = torch.cat((self.q_norm(q_BSHE), self.k_norm(k_BSKE)), dim=2)
        if self.rope and self.norm_eps is None:
            q_BSHE, k_BSKE = rotate(qk_BSHE, rotations).split([queries, self.keys], dim=2)
        else:
            q_BSHE, k_BSKE = qk_BSHE.split([queries, self.keys], dim=2)
            q_BSHE, k_BSKE = self.place(q_BSHE, k_BSKE, rotations)
        return self.attend(q_BSHE, k_BSKE, v_BSKE, mask)


class _PackedFeedForward(FeedForward):
    """A feed-forward that multiplies its input once, by w1 and w3 together."""

    def __init__(self, plain: FeedForward):
        nn.Module.__init__(self)
        self.packed = joined(plain.w1, plain.w3)
        self.w2 = plain.w2

    @staticmethod
    def accepts(plain: FeedForward) -> bool:
        return _are_plain(plain.w1, plain.w3)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate_BSF, up_BSF = multiply(x_BSD, self.packed).chunk(2, dim=-1)
        return self.w2(F.silu(gate_BSF).mul_(up_BSF))


def _pack_head(head: OutputHead, model: Decoder) -> None:
    tied = model.tok_embeddings.weight if model.args.tie_embeddings and model.tok_embeddings else head.weight
    assert tied is not None
    packed = reordered(tied), None
    head.logits = lambda h, weight: multiply(h, packed)
