"""Training of single rows of the token embedding, such as those of new tokens, together with LoRA.

The rows are a parameter of their own, which FSDP, tensor parallelism and checkpoints treat like any other;
the table stays frozen. Like PEFT's trainable tokens, they are new values, not differences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from toolkit.distributed.dtensor import shard_and_offset
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.plain_linear import check_plain


class TokenRows(nn.Embedding):
    """Replacement of ``base`` in which tokens of ``indices`` have the rows ``token_rows`` (N, D), in this
    order.

    Tensor parallelism may shard the vocabulary: the weight then starts at the row ``first``, from which
    tokens are counted.
    """

    tensor_placements = {"embedding": {"token_rows": "whole"}}

    def __init__(self, base: nn.Embedding, indices: Sequence[int]):
        super().__init__(base.num_embeddings, base.embedding_dim, _weight=base.weight)
        self.token_rows = nn.Parameter(base.weight.new_empty(len(indices), base.embedding_dim))
        self.indices = list(indices)
        self.first = 0
        self.enabled = True
        self._constants: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        h_BSD = super().forward(tokens)
        if not self.enabled:
            return h_BSD
        sorted_N, order_N = self._sorted(tokens.device)
        place_BS = torch.searchsorted(sorted_N, tokens + self.first).clamp(max=len(sorted_N) - 1)
        is_trained_BS = sorted_N[place_BS] == tokens + self.first
        return torch.where(is_trained_BS[..., None], F.embedding(order_N[place_BS], self.token_rows), h_BSD)

    def replace_tied(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the rows into the copy of the table, or of this rank's shard of it, that a tied ``head`` reads;
        a forward pre-hook."""
        h, labels, tied_VD = (*args, None, None)[:3]
        if tied_VD is None or not self.enabled:
            return args
        rows_ND: Tensor = self.token_rows
        if isinstance(rows_ND, DTensor):  # replicated over a shard of the vocabulary per rank
            rows_ND = rows_ND.to_local(grad_placements=[Partial()])
        sorted_N, order_N = self._sorted(tied_VD.device)
        ends = (self.first, self.first + len(tied_VD))
        own = slice(*(bisect_left(sorted(self.indices), end) for end in ends))
        return h, labels, tied_VD.index_copy(0, sorted_N[own] - self.first, rows_ND[order_N[own]])

    def _sorted(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the sorted indices and the order that sorts them, copied to ``device`` only once."""
        if self._constants is None or self._constants[0].device != device:
            sorted_N, order_N = torch.tensor(self.indices).sort()
            self._constants = sorted_N.to(device), order_N.to(device)
        return self._constants

    @torch.no_grad()
    def reset_from_weight(self) -> None:
        """Set the rows to those of the loaded weight, which may be sharded."""
        shard, (first, _) = shard_and_offset(self.weight)
        rows = shard.new_zeros(len(self.indices), shard.shape[1])
        place = torch.tensor(self.indices, device=shard.device) - first
        own = (place >= 0) & (place < len(shard))
        rows[own] = shard[place[own]]
        if isinstance(self.weight, DTensor):
            summed = [it if isinstance(it, Replicate) else Partial() for it in self.weight.placements]
            rows = DTensor.from_local(rows, self.weight.device_mesh, summed).full_tensor()
        token_rows, (first, _) = shard_and_offset(self.token_rows)
        token_rows.copy_(rows[first : first + len(token_rows)])


def apply_token_rows(model: Decoder, indices: Sequence[int]) -> None:
    """Let the embedding of ``model``, if this stage has it, and a tied head train the rows ``indices``, in
    place.

    Raises:
        ConfigError: the embedding is not a plain torch.nn.Embedding.
    """
    if model.tok_embeddings is None:
        return
    key, without = "finetune.trainable_token_indices", "remove it"
    check_plain(
        "tok_embeddings", model.tok_embeddings, key=key, value=indices, without=without, kind=nn.Embedding
    )
    rows = TokenRows(model.tok_embeddings, indices)
    model.tok_embeddings = rows
    if model.args.tie_embeddings and model.output is not None:
        model.output.register_forward_pre_hook(rows.replace_tied)
