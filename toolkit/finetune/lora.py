"""LoRA and DoRA: linear layers, embeddings and output heads with a low-rank update of a frozen weight.

A layer keeps its ``weight`` and its name; ``lora_a`` (R, in) and ``lora_b`` (out, R) are additional
parameters, which FSDP, tensor parallelism and checkpoints treat like any other. With DoRA, rows of the
updated weight are scaled to the norm ``magnitude`` (out,). The rows' current norm is treated as a constant in
backward, as in section 4.3 of the paper (arXiv:2402.09353).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.compat import unsafe_view
from toolkit.config.finetune import LoRA
from toolkit.distributed.dtensor import shard_and_offset
from toolkit.finetune.nf4 import dequantize, linear
from toolkit.hardware import device_type
from toolkit.models.common.lm_head import OutputHead
from toolkit.models.common.plain_linear import check_plain


class LoRALinear(nn.Linear):
    """Replacement of ``base``: x ↦ W x + s·B A dropout(x); with ``magnitude``, each row is multiplied by
    m / ‖W + s·B A‖.

    Tensor parallelism may shard its features.
    """

    tensor_placements = {
        "column": {"lora_a": "whole", "lora_b": "column", "magnitude": "column"},
        "row": {"lora_a": "row", "lora_b": "whole", "magnitude": "whole"},
    }
    """Placements of the added parameters, by the tensor-parallel style of the layer."""

    def __init__(self, base: nn.Linear, options: LoRA):
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_a, self.lora_b = _new_update(base.weight, options.rank)
        self.magnitude = nn.Parameter(self.lora_b.new_empty(self.out_features)) if options.use_dora else None
        self.scale = options.scale
        self.dropout = options.dropout
        self.enabled = True
        # Sums over the ranks that have shards of each row.
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda squares: squares

    def forward(self, x: Tensor) -> Tensor:
        result = linear(x, self.weight, self.bias)
        if not self.enabled:
            return result
        dropped = drop(x, self.dropout) if self.dropout and self.training else x
        inner = F.linear(dropped, self.lora_a).flatten(0, -2)
        if self.magnitude is None:  # addmm fuses scaling and addition into the matmul
            sums = torch.addmm(result.flatten(0, -2), inner, self.lora_b.T, alpha=self.scale)
            # FSDP warns about a unit that returns what autograd tracks as a view.
            return unsafe_view(sums, result.shape)
        update = (inner @ self.lora_b.T * self.scale).view_as(result)
        ratio = self.magnitude / self._row_norms().to(self.magnitude.dtype)
        return result + linear(dropped, self.weight) * (ratio - 1) + update * ratio

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        merged = _dequantized(self.weight, self.lora_b.dtype) + self.lora_b @ self.lora_a * self.scale
        precise = torch.promote_types(merged.dtype, torch.float32)
        return self.sum_over_ranks(merged.to(precise).square().sum(dim=1)).sqrt()

    @torch.no_grad()
    def reset_from_weight(self) -> None:
        """Set the magnitudes to the norms of the rows of the loaded weight, which may be sharded."""
        if self.magnitude is None:
            return
        weight = self.weight.detach()
        if isinstance(weight, DTensor) and isinstance(self.magnitude, DTensor):
            # With full rows, the norms are bitwise equal on any mesh.
            weight = weight.redistribute(placements=self.magnitude.placements).to_local()
        magnitude, _ = shard_and_offset(self.magnitude)
        magnitude.copy_(torch.linalg.vector_norm(_dequantized(weight, magnitude.dtype), dim=1))


class LoRAEmbedding(nn.Embedding):
    """Replacement of ``base``: token t ↦ row t of W + s·B A, without dropout, as in PEFT.

    Tensor parallelism may shard its vocabulary.
    """

    tensor_placements = {"embedding": {"lora_a": "whole", "lora_b": "column"}}

    def __init__(self, base: nn.Embedding, options: LoRA):
        super().__init__(base.num_embeddings, base.embedding_dim, device="meta")
        self.weight = base.weight
        self.lora_a, self.lora_b = _new_update(base.weight, options.rank)
        self.scale = options.scale
        self.enabled = True

    def forward(self, tokens: Tensor) -> Tensor:
        result = super().forward(tokens)
        if not self.enabled:
            return result
        # Backward reads the scaled copy of A instead of a parameter, which FSDP would have to gather again.
        return result + F.embedding(tokens, self.lora_b) @ (self.lora_a * self.scale)


class LoRAHead(OutputHead):
    """Replacement of ``base``: h ↦ logits W h + s·B A dropout(h), or their loss, computed by a head with the
    weight [W B] (V, D + R) and the input [h, s·A dropout(h)].

    So every function of the head applies unchanged, at the cost of a copy of W in each forward, and of its
    gradient, which is not used. The update is not rounded to the precision of W, as in a sum of weights.
    """

    tensor_placements = {"head": {"lora_a": "whole", "lora_b": "column"}}

    def __init__(self, base: OutputHead, options: LoRA):
        nn.Module.__init__(self)
        assert base.weight is not None, "a tied head has no update"
        self.weight, self.loss_chunk_tokens = base.weight, base.loss_chunk_tokens
        self.logits, self.loss, self.training_losses = base.logits, base.loss, base.training_losses
        self.lora_a, self.lora_b = _new_update(base.weight, options.rank)
        self.scale = options.scale
        self.dropout = options.dropout
        self.enabled = True

    def forward(self, h_BSD: Tensor, labels: Tensor | None = None, tied_VD: Tensor | None = None) -> Tensor:
        if not self.enabled:
            return super().forward(h_BSD, labels)
        dropped_BSD = drop(h_BSD, self.dropout) if self.dropout and self.training else h_BSD
        inner_BSR = F.linear(dropped_BSD, self.lora_a) * self.scale
        assert self.weight is not None
        weights = torch.cat([self.weight, self.lora_b], 1)
        return super().forward(torch.cat([h_BSD, inner_BSR], -1), labels, weights)


def _new_update(weight: Tensor, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return uninitialized parameters ``lora_a`` and ``lora_b`` for a weight (out, in)."""
    rows, columns = weight.shape
    return nn.Parameter(weight.new_empty(rank, columns)), nn.Parameter(weight.new_empty(rows, rank))


def drop(x: Tensor, probability: float) -> Tensor:
    """Compute F.dropout in training."""
    if device_type(x.device.type) == "cuda":  # as F.dropout does there; a dry run counts its mask
        return torch.native_dropout(x, probability, True)[0]
    return F.dropout(x, probability)


def _dequantized(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize(weight, dtype) if weight.dtype == torch.uint8 else weight.to(dtype)


def apply_lora(model: nn.Module, targets: Iterable[str], options: LoRA) -> None:
    """Replace the linear layers, embedding and head named ``targets`` by LoRA layers, in place; layers of
    other stages are skipped.

    Raises:
        ConfigError: a target is not a plain torch.nn.Linear, torch.nn.Embedding or OutputHead.
    """
    ends: dict[str, tuple[type[nn.Module], Any]] = {
        "tok_embeddings": (nn.Embedding, LoRAEmbedding),
        "output": (OutputHead, LoRAHead),
    }
    modules = dict(model.named_modules())
    for name in targets:
        if name in modules:
            kind, replacement = ends.get(name, (nn.Linear, LoRALinear))
            check_plain(
                name,
                modules[name],
                key="finetune.lora.target_modules",
                value=options.target_modules,
                without="remove it from that list",
                kind=kind,
            )
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, replacement(modules[name], options))
