"""Mixture of experts: a router and experts instead of a block's feed-forward. No token is dropped.

Tokens are sorted by expert, each expert computes its contiguous rows, and each token adds the outputs of its
experts in the order of its choices. So a token's result does not depend on the other tokens, and is the same
on any mesh, up to rounding. Shapes: T tokens, E experts, k choices per token, M = T·k rows, D model dim, F
expert width. Names are torchtitan's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from toolkit.compat import unsafe_view
from toolkit.models.common.args import ModelArgs, MoEArgs
from toolkit.models.common.block_output import BlockOutput
from toolkit.models.common.grouped_linear import grouped_linear
from toolkit.models.common.swiglu import clamped_swiglu, swiglu


class Routing(NamedTuple):
    """The router's choice.

    ``scores_TE`` are those of all experts, with gradients; ``weights_Tk`` of the chosen experts
    ``experts_Tk``.
    """

    logits_TE: Tensor
    scores_TE: Tensor
    weights_Tk: Tensor
    experts_Tk: Tensor


LOAD = "expert_load"
"""Name of the choices of each expert in :attr:`BlockOutput.per_layer`."""
BALANCE_LOSS, Z_LOSS = "moe/load_balance_loss", "moe/router_z_loss"
Compute = Callable[[Tensor, Tensor], Tensor]
"""Function of rows (M, D) sorted by expert, and the number of rows of each of this rank's experts, that
returns (M, D)."""


class Dispatch(Protocol):
    """Sends rows to the ranks of their experts, computes there, and returns the results in the same order."""

    def __call__(self, rows_MD: Tensor, counts_E: Tensor, compute: Compute) -> Tensor: ...


class HiddenLayout(Protocol):
    """Layout of hidden states between blocks under tensor parallelism."""

    def gather(self, x: Tensor) -> Tensor: ...

    def reduce(self, x: Tensor) -> Tensor: ...


@dataclass
class RouterLosses:
    """Auxiliary losses of a layer's router, summed over this rank's tokens.

    The balancing loss of a token is ``balance`` · Σ f_e · p_e, with p_e its normalized scores and f_e the
    expert's share of choices, 1 if balanced: in the token's sequence (DeepSeek-V3, arXiv:2412.19437), or in
    the global batch (arXiv:2501.11873). The z-loss is ``z`` · log² Σ exp(logits) (arXiv:2202.08906).

    Attributes:
        per_sequence: count shares per sequence instead of over the global batch.
        add_counts: adds counts over the ranks that share sequences, or all ranks that share the batch.
        shares_E: shares in the global batch if it has several micro-batches; else they are counted here.
    """

    balance: float = 0.0
    z: float = 0.0
    per_sequence: bool = False
    add_counts: Callable[[Tensor], Tensor] | None = None
    shares_E: Tensor | None = None

    def __call__(self, routing: Routing, shape: torch.Size, counted: float) -> dict[str, Tensor]:
        """Return losses by name, each multiplied by ``counted``, for hidden states of ``shape`` (B, S, D)."""
        losses = {}
        if self.balance:
            probabilities_TE = routing.scores_TE / routing.scores_TE.sum(-1, keepdim=True)
            sums_BE = probabilities_TE.unflatten(0, shape[:2]).sum(1)
            shares_BE = self._shares_BE(routing, shape) if self.shares_E is None else self.shares_E
            weighted_BE = sums_BE * shares_BE.to(sums_BE.dtype)
            losses[BALANCE_LOSS] = self.balance * counted * weighted_BE.sum()
        if self.z:
            losses[Z_LOSS] = self.z * counted * routing.logits_TE.logsumexp(-1).square().sum()
        return losses

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the losses that are not 0."""
        return tuple(name for name, weight in ((BALANCE_LOSS, self.balance), (Z_LOSS, self.z)) if weight)

    def _shares_BE(self, routing: Routing, shape: torch.Size) -> Tensor:
        experts, rows = routing.scores_TE.shape[1], shape[0] if self.per_sequence else 1
        of_row = torch.arange(rows, device=routing.experts_Tk.device)[:, None] * experts
        in_rows = routing.experts_Tk.view(rows, -1) + of_row
        counts_BE = count(in_rows, rows * experts).view(rows, experts)
        if self.add_counts is not None:
            counts_BE = self.add_counts(counts_BE)
        return shares(counts_BE)


def shares(counts: Tensor) -> Tensor:
    """Return counts of choices (…, E) divided by their mean over experts, in fp64; 1 if there are none."""
    counts = counts.double()
    mean = counts.mean(-1, keepdim=True)
    return torch.where(mean > 0, counts / mean.clamp(min=1e-300), 1.0)


class Router(nn.Module):
    """Scores of experts for each token, and its choice of ``top_k`` of them.

    Attributes:
        kept: set while a checkpointed block runs; the choice of its first forward, for recomputations.
    """

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.args = args
        self.gate = nn.Linear(dim, args.num_experts, bias=args.bias)
        self.force_load_balance = False  # of debug.moe_force_load_balance
        self.kept: list[Tensor] | None = None

    def forward(self, x_TD: Tensor, bias_E: Tensor | None) -> Routing:
        args = self.args
        logits_TE = self.gate(x_TD)
        wide = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        scores_TE = wide.softmax(-1) if args.score_func == "softmax" else wide.sigmoid()
        # Large logits have the same sigmoid in fp32, where published code chooses by logits.
        plain = args.score_func == "sigmoid" and bias_E is None and not args.num_expert_groups
        compared_TE = (wide if plain else scores_TE).detach()
        experts_Tk = self.kept[0] if self.kept else self._choose(compared_TE, bias_E)
        if self.kept is not None and not self.kept:
            self.kept.append(experts_Tk)
        weights_Tk = scores_TE.gather(1, experts_Tk)
        if args.route_norm:
            # As in published code: sigmoid scores may all be tiny, probabilities of a softmax cannot.
            tiny = 1e-20 if args.score_func == "sigmoid" else 0.0
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + tiny)
        return Routing(wide, scores_TE, weights_Tk * args.route_scale, experts_Tk)

    def _choose(self, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        args = self.args
        if self.force_load_balance:
            tokens, k = len(scores_TE), args.top_k
            return torch.arange(tokens * k, device=scores_TE.device).view(tokens, k) % args.num_experts
        if bias_E is not None:
            scores_TE = scores_TE + bias_E.to(scores_TE.dtype)
        if args.num_expert_groups:
            scores_TGe = scores_TE.unflatten(-1, (args.num_expert_groups, -1))
            # DeepSeek-V3 adds the two best scores of a group; V2, whose scores are a softmax, takes the best.
            best = 2 if args.score_func == "sigmoid" else 1
            groups_Tg = scores_TGe.topk(best, -1).values.sum(-1).topk(args.num_limited_groups, -1).indices
            allowed_TG = torch.zeros_like(scores_TGe[..., 0], dtype=torch.bool).scatter(1, groups_Tg, True)
            scores_TE = scores_TGe.masked_fill(~allowed_TG[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(args.top_k, dim=-1).indices


class Experts(nn.Module):
    """SwiGLU feed-forwards, stacked: w1 and w3 (E, F, D), w2 (E, D, F), and their biases (E, F) and (E, D)
    if the model has them."""

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.args, self.num_experts = args, args.num_experts
        shapes = {"w1": (args.ffn_dim, dim), "w2": (dim, args.ffn_dim), "w3": (args.ffn_dim, dim)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(args.num_experts, *shape)))
        for name, (rows, _) in shapes.items():
            bias = nn.Parameter(torch.empty(args.num_experts, rows)) if args.bias else None
            self.register_parameter(f"{name}_bias", bias)
        self.dispatch: Dispatch | None = None  # set by expert parallelism

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token, or the sum of their outputs for its
        weighted hidden states."""
        flat_M = experts_Tk.flatten()
        order_M = flat_M.argsort(stable=True)
        place_M = inverse(order_M)
        rows_MD = _Sort.apply(x_TD, order_M, place_M, experts_Tk.shape[1])
        if self.args.score_before_experts:
            weights_M = Permute.apply(weights_Tk.flatten(), order_M, place_M)
            rows_MD = rows_MD * weights_M[:, None].to(rows_MD.dtype)
            weights_Tk = torch.ones_like(weights_Tk)
        counts_E = count(flat_M, self.num_experts)
        if self.dispatch is None:
            out_MD = self.compute(rows_MD, counts_E)
        else:
            out_MD = self.dispatch(rows_MD, counts_E, self.compute)
        out_TkD = Permute.apply(out_MD, place_M, order_M).unflatten(0, experts_Tk.shape)
        # A batched matmul, which adds the k outputs of a token in fp32. Not a view: FSDP warns of one.
        out_T1D = torch.bmm(weights_Tk[:, None].to(out_TkD.dtype), out_TkD)
        return unsafe_view(out_T1D, (len(out_TkD), -1))

    def compute(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Return the experts' outputs for rows sorted by expert, with the number of rows of each."""
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        gate_MF, up_MF = (self._biased(name, rows_MD, ends_E) for name in ("w1", "w3"))
        limit, alpha = self.args.swiglu_limit, self.args.swiglu_alpha
        hidden_MF = clamped_swiglu(gate_MF, up_MF, limit, alpha) if limit else swiglu(gate_MF, up_MF)
        return self._biased("w2", hidden_MF, ends_E)

    def _biased(self, name: str, x_MK: Tensor, ends_E: Tensor) -> Tensor:
        out_MN, bias_EN = self._linear(name, x_MK, ends_E), getattr(self, f"{name}_bias")
        if bias_EN is None:
            return out_MN
        # A matmul with ones adds each expert's bias to its rows, and sums its gradient, in a fixed order.
        return out_MN + grouped_linear(x_MK.new_ones(len(x_MK), 1), bias_EN[..., None], ends_E)

    def _linear(self, name: str, x_MK: Tensor, ends_E: Tensor) -> Tensor:
        """Multiply rows sorted by expert by the weight ``name``; see :func:`grouped_linear`."""
        return grouped_linear(x_MK, getattr(self, name), ends_E)


def count(experts: Tensor, num_experts: int) -> Tensor:
    """Return how often each expert occurs: (E,) int64."""
    experts = experts.flatten()
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return zeros.scatter_add(0, experts, torch.ones_like(experts))


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


class _Sort(torch.autograd.Function):
    """Repeats each token for each of its k choices, in the given order. Its inverse, ``place_M``, is the row
    of each choice. Backward adds the choices in their order, without atomics. Both only gather: on CUDA that
    is five times as fast as index_copy."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_M: Tensor, place_M: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(place_M)
        ctx.choices = choices
        return x_TD.index_select(0, order_M // choices)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None, None]:
        (place_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, place_M).unflatten(0, (-1, ctx.choices)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Rows in the given order, whose inverse backward takes."""

    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, order_M: Tensor, inverse_M: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_M)
        return rows_MD.index_select(0, order_M)

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_M,) = ctx.saved_tensors
        return grad_MD.index_select(0, inverse_M), None, None


class MoE(nn.Module):
    """Router, experts and shared experts.

    Attributes:
        losses: auxiliary losses of training; None adds none.
        layout: set by tensor parallelism, which shards every expert's width.
        counted: fraction of its tokens for which this rank counts load and losses, if others have them too.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        assert args.moe is not None
        moe = args.moe
        self.router = Router(args.dim, moe)
        self.experts = Experts(args.dim, moe)
        self.shared_experts: nn.Module | None = None  # set by the block
        self.register_buffer("expert_bias", torch.empty(moe.num_experts) if moe.expert_bias else None)
        self.expert_bias: Tensor | None
        self.losses: RouterLosses | None = None
        self.layout: HiddenLayout | None = None
        self.counted = 1.0

    def forward(self, x_BSD: Tensor) -> BlockOutput:
        """Return what the block adds to its hidden states, with losses and load."""
        full_BSD = x_BSD if self.layout is None else self.layout.gather(x_BSD)
        routing = self.router(full_BSD.flatten(0, 1), self.expert_bias)
        out_TD = self.experts(full_BSD.flatten(0, 1), routing.weights_Tk, routing.experts_Tk)
        out_BSD = out_TD.view_as(full_BSD)
        if self.layout is not None:
            out_BSD = self.layout.reduce(out_BSD)
        if self.shared_experts is not None:
            out_BSD = out_BSD + self.shared_experts(x_BSD)
        load_E = count(routing.experts_Tk, self.experts.num_experts) * self.counted
        losses = {}
        if self.losses is not None and torch.is_grad_enabled():
            losses = self.losses(routing, full_BSD.shape, self.counted)
        return BlockOutput(out_BSD, losses, per_layer={LOAD: load_E})
