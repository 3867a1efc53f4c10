"""Mixture of experts beside a loop over tokens and choices, and its losses beside their formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.families import read, save_transformers
from toolkit.models.common.args import ModelArgs, MoEArgs
from toolkit.models.common.decoder import FeedForward
from toolkit.models.common.moe import BALANCE_LOSS, LOAD, Z_LOSS, MoE, RouterLosses, Routing, count, shares
from toolkit.models.registry import resolve

DIM = 6
PLAIN = MoEArgs(num_experts=8, top_k=2, ffn_dim=5)
ALL = replace(
    PLAIN, num_shared_experts=2, score_func="sigmoid", route_norm=True, route_scale=2.5, expert_bias=True,
    num_expert_groups=4, num_limited_groups=2,
)  # fmt: skip
OPTIONS = {
    "softmax": PLAIN,
    "sigmoid": replace(PLAIN, score_func="sigmoid"),
    "normalized softmax": replace(PLAIN, route_norm=True),
    "normalized sigmoid": replace(PLAIN, score_func="sigmoid", route_norm=True),
    "scaled": replace(PLAIN, route_scale=0.7),
    "bias": replace(PLAIN, expert_bias=True),
    "shared": replace(PLAIN, num_shared_experts=1),
    "groups of softmax": replace(PLAIN, top_k=3, num_expert_groups=4, num_limited_groups=2),
    "groups of sigmoid": replace(
        PLAIN, top_k=3, score_func="sigmoid", num_expert_groups=2, num_limited_groups=1
    ),
    "one expert": replace(PLAIN, top_k=1),
    "all experts": replace(PLAIN, top_k=8),
    "everything": ALL,
}
# Sums of a few dozen fp64 products of order 1, in another order.
EXACT = {"atol": 1e-12, "rtol": 1e-12}


def _build(args: MoEArgs, dtype: torch.dtype = torch.float64) -> MoE:
    model: ModelArgs = replace(resolve("llama3.1", "debugmodel"), dim=DIM, moe=args)
    moe = MoE(model)
    if args.num_shared_experts:
        moe.shared_experts = FeedForward(DIM, args.num_shared_experts * args.ffn_dim)
    moe.to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*moe.parameters(), *moe.buffers()):
            tensor.normal_(std=0.7, generator=generator)
    return moe


def _tokens(batch: int = 3, length: int = 7, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, DIM, generator=generator, dtype=torch.float64, requires_grad=True)


def _chosen(moe: MoE, scores: list[float]) -> list[int]:
    """The experts of a token, best first."""
    args = moe.router.args
    if moe.expert_bias is not None:
        scores = [score + bias for score, bias in zip(scores, moe.expert_bias.tolist(), strict=True)]
    allowed = set(range(args.num_experts))
    if args.num_expert_groups:
        size = args.num_experts // args.num_expert_groups
        groups = [range(first, first + size) for first in range(0, args.num_experts, size)]
        added = 2 if args.score_func == "sigmoid" else 1
        best = sorted(
            groups, key=lambda group: -sum(sorted((scores[expert] for expert in group), reverse=True)[:added])
        )
        allowed = {expert for group in best[: args.num_limited_groups] for expert in group}
    return sorted(allowed, key=lambda expert: -scores[expert])[: args.top_k]


def _naive(moe: MoE, x: Tensor, choices: list[list[int]] | None = None) -> tuple[Tensor, list[list[int]]]:
    """The layer's output token by token, and the choices; those of equal scores are given."""
    args, experts, out, chosen = moe.router.args, moe.experts, [], []
    for token, x_D in enumerate(x.flatten(0, 1)):
        logits = moe.router.gate.weight @ x_D
        scores = logits.softmax(0) if args.score_func == "softmax" else logits.sigmoid()
        mine = choices[token] if choices else _chosen(moe, scores.tolist())
        weights = [scores[expert] for expert in mine]
        if args.route_norm:
            weights = [weight / sum(weights) for weight in weights]
        y = torch.zeros_like(x_D)
        for expert, weight in zip(mine, weights, strict=True):
            hidden = F.silu(experts.w1[expert] @ x_D) * (experts.w3[expert] @ x_D)
            y = y + args.route_scale * weight * (experts.w2[expert] @ hidden)
        if moe.shared_experts is not None:
            shared: Any = moe.shared_experts
            y = y + shared.w2.weight @ (F.silu(shared.w1.weight @ x_D) * (shared.w3.weight @ x_D))
        out.append(y)
        chosen.append(mine)
    return torch.stack(out).view_as(x), chosen


def _load(choices: list[list[int]], experts: int) -> list[int]:
    flat = sum(choices, [])
    return [flat.count(expert) for expert in range(experts)]


def _compare(moe: MoE, x: Tensor, choices: list[list[int]] | None = None) -> list[int]:
    """Compare output, load and all gradients with the loop's; return the load."""
    found = moe(x)
    expected, chosen = _naive(moe, x, choices)
    torch.testing.assert_close(found.hidden, expected, **EXACT)
    load = _load(chosen, moe.experts.num_experts)
    assert found.per_layer[LOAD].tolist() == load and not found.losses
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    of = (x, *moe.parameters())
    ours = torch.autograd.grad(found.hidden, of, upstream)
    theirs = torch.autograd.grad(expected, of, upstream, materialize_grads=True)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, **EXACT)
    return load


@pytest.mark.parametrize("args", OPTIONS.values(), ids=OPTIONS)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(args: MoEArgs) -> None:
    load = _compare(_build(args), _tokens())
    assert sum(load) == 21 * args.top_k


def test_one_token() -> None:
    _compare(_build(ALL), _tokens(1, 1))


@pytest.mark.parametrize("args", [PLAIN, ALL], ids=["plain", "everything"])
def test_equal_scores_choose_different_experts(args: MoEArgs) -> None:
    moe = _build(args)
    with torch.no_grad():
        moe.router.gate.weight.zero_()
        if moe.expert_bias is not None:
            moe.expert_bias.zero_()
    x = _tokens()
    choices = moe.router(x.flatten(0, 1), moe.expert_bias).experts_Tk.tolist()
    assert all(len(set(mine)) == args.top_k for mine in choices)
    _compare(moe, x, choices)


def test_all_tokens_to_one_expert() -> None:
    moe = _build(replace(PLAIN, top_k=1, expert_bias=True))
    assert moe.expert_bias is not None
    moe.expert_bias.copy_(10.0 * F.one_hot(torch.tensor(5), 8))
    assert _compare(moe, _tokens()) == [0, 0, 0, 0, 0, 21, 0, 0]
    moe.expert_bias.copy_(-10.0 * F.one_hot(torch.tensor(5), 8))
    load = _compare(moe, _tokens())
    assert load[5] == 0 and sum(load) == 21


def test_a_bias_changes_the_choice_but_not_the_weights() -> None:
    moe, x = _build(replace(PLAIN, score_func="sigmoid", expert_bias=True)), _tokens().flatten(0, 1)
    with_bias, without = moe.router(x, moe.expert_bias), moe.router(x, None)
    assert not torch.equal(with_bias.experts_Tk, without.experts_Tk)
    assert torch.equal(with_bias.scores_TE, without.scores_TE)
    assert torch.equal(with_bias.weights_Tk, without.scores_TE.gather(1, with_bias.experts_Tk))


def test_normalized_weights_add_up_to_the_scale() -> None:
    for args in (replace(PLAIN, route_norm=True, route_scale=1.5), ALL):
        moe = _build(args)
        sums = moe.router(_tokens().flatten(0, 1), moe.expert_bias).weights_Tk.sum(-1)
        torch.testing.assert_close(sums, torch.full_like(sums, args.route_scale), **EXACT)


def test_tiny_sigmoid_scores_give_finite_weights() -> None:
    """The sum of scores of fp32 logits of -200 is 0."""
    moe = _build(replace(PLAIN, score_func="sigmoid", route_norm=True), torch.float32)
    with torch.no_grad():
        moe.router.gate.weight.fill_(-200.0)
    assert torch.isfinite(moe(torch.ones(1, 2, DIM)).hidden).all()


def test_scores_of_bf16_are_computed_in_fp32() -> None:
    moe = _build(PLAIN, torch.bfloat16)
    routing = moe.router(_tokens().flatten(0, 1).bfloat16(), None)
    assert routing.logits_TE.dtype == routing.scores_TE.dtype == routing.weights_Tk.dtype == torch.float32
    # 1 to a rounding of fp32, where bf16 is off by 1e-3.
    torch.testing.assert_close(routing.scores_TE.sum(-1), torch.ones(21), atol=1e-6, rtol=0)


def test_a_token_has_the_same_output_whatever_is_beside_it() -> None:
    moe, x = _build(ALL), _tokens(4, 5)
    together = moe(x).hidden
    for row in range(4):
        torch.testing.assert_close(moe(x[row : row + 1]).hidden[0], together[row], **EXACT)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(moe(x[order]).hidden, together[order], **EXACT)


@pytest.mark.parametrize("args", [PLAIN, replace(ALL, top_k=4)], ids=["plain", "everything"])
def test_forced_balance_gives_equal_loads(args: MoEArgs) -> None:
    moe, x = _build(args), _tokens(2, 8)
    moe.router.force_load_balance = True
    choices = moe.router(x.flatten(0, 1), moe.expert_bias).experts_Tk.tolist()
    assert all(len(set(mine)) == args.top_k for mine in choices)
    assert _compare(moe, x, choices) == [16 * args.top_k // 8] * 8


def _routing(args: MoEArgs, x: Tensor) -> tuple[Routing, torch.Size]:
    moe = _build(args)
    return moe.router(x.flatten(0, 1), moe.expert_bias), x.shape


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_balancing_loss_is_that_of_transformers(top_k: int) -> None:
    """Ours is a sum over tokens of Σ f·p with f = counts · E / (T · k), 1 if balanced; theirs is
    E · Σ (counts / T) · (Σ p / T), k if balanced. So theirs is k times our mean per token."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    routing, shape = _routing(replace(PLAIN, top_k=top_k), _tokens())
    tokens = shape[0] * shape[1]
    ours = RouterLosses(balance=0.01)(routing, shape, 1.0)
    theirs = load_balancing_loss_func((routing.logits_TE,), 8, top_k)
    assert list(ours) == [BALANCE_LOSS] and isinstance(theirs, Tensor)
    # Theirs is in fp32.
    torch.testing.assert_close(ours[BALANCE_LOSS] * top_k / tokens, 0.01 * theirs.double(), rtol=1e-6, atol=0)
    gradients = [
        torch.autograd.grad(loss, routing.logits_TE, retain_graph=True)[0]
        for loss in (ours[BALANCE_LOSS] * top_k / tokens, 0.01 * theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-9)


def test_the_balancing_loss_and_gradients_of_a_router_with_biases_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import load_balancing_loss_func

    reference, model = save_transformers(tmp_path, "gpt_oss"), read(tmp_path)
    tokens, found = torch.arange(120).view(2, 60), []
    for block in model.layers.values():
        block.moe.losses = RouterLosses(balance=1.0)
        block.moe.register_forward_hook(lambda *it: found.append(it[-1].losses[BALANCE_LOSS] / 120))
    model(tokens)
    logits = reference(tokens, output_router_logits=True).router_logits
    theirs = [load_balancing_loss_func((it,), 8, 3) / 3 for it in logits]  # as above
    torch.testing.assert_close(torch.stack(found), torch.stack(theirs), rtol=1e-5, atol=0)
    sum(found).backward()
    sum(theirs).backward()
    for block, layer in zip(model.layers.values(), reference.model.layers, strict=True):
        for name in ("weight", "bias"):
            ours, grad = (getattr(it, name).grad for it in (block.moe.router.gate, layer.mlp.router))
            assert (ours - grad).norm() <= 1e-5 * grad.norm()


def test_a_balanced_router_has_a_loss_of_one_per_token() -> None:
    moe, x = _build(PLAIN), _tokens(2, 8)
    moe.router.force_load_balance = True
    loss = RouterLosses(balance=1.0)(moe.router(x.flatten(0, 1), None), x.shape, 1.0)[BALANCE_LOSS]
    assert loss.item() == pytest.approx(16, rel=1e-12)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_shares_per_sequence_are_counted_in_each(score_func: Any) -> None:
    """The sum of the losses of each sequence alone, and not the loss of all sequences together."""
    args, x = replace(PLAIN, score_func=score_func), _tokens()
    routing, shape = _routing(args, x)
    found = RouterLosses(0.1, per_sequence=True)(routing, shape, 1.0)[BALANCE_LOSS]
    together = RouterLosses(0.1)(routing, shape, 1.0)[BALANCE_LOSS]
    expected = torch.zeros(())
    for row in x:
        alone, _ = _routing(args, row[None])
        p = alone.scores_TE / alone.scores_TE.sum(-1, keepdim=True)
        f = torch.tensor(_load(alone.experts_Tk.tolist(), 8)).double() * 8 / (7 * args.top_k)
        expected = expected + 0.1 * (p * f).sum()
    torch.testing.assert_close(found, expected, **EXACT)
    assert not torch.allclose(found, together, rtol=1e-3)


def test_given_shares_and_added_counts_replace_those_of_the_micro_batch() -> None:
    routing, shape = _routing(PLAIN, _tokens())
    own = count(routing.experts_Tk, 8)
    others = torch.arange(8)
    f = (own + others).double() * 8 / (own + others).sum()
    expected = 0.5 * (routing.scores_TE * f).sum()
    added = RouterLosses(0.5, add_counts=lambda counts: counts + others)
    given = RouterLosses(0.5, shares_E=shares(own + others))
    for losses in (added, given):
        torch.testing.assert_close(losses(routing, shape, 1.0)[BALANCE_LOSS], expected, **EXACT)


def test_the_z_loss_is_the_squared_log_of_the_denominator() -> None:
    routing, shape = _routing(ALL, _tokens())
    losses = RouterLosses(z=1e-3)
    assert losses.names == (Z_LOSS,) == tuple(losses(routing, shape, 1.0))
    expected = sum(logits.exp().sum().log() ** 2 for logits in routing.logits_TE) * 1e-3
    torch.testing.assert_close(losses(routing, shape, 1.0)[Z_LOSS], expected, **EXACT)
    torch.testing.assert_close(losses(routing, shape, 0.25)[Z_LOSS], expected / 4, **EXACT)


def test_losses_are_those_of_training() -> None:
    moe, x = _build(ALL), _tokens()
    moe.losses = RouterLosses(0.1, 0.01)
    moe.counted = 0.5
    found = moe(x)
    assert tuple(found.losses) == moe.losses.names == (BALANCE_LOSS, Z_LOSS)
    assert found.per_layer[LOAD].sum() == 21
    gradients = torch.autograd.grad(sum(found.losses.values()), moe.router.gate.weight)
    assert gradients[0].any()
    with torch.no_grad():
        assert not moe(x).losses


def test_shares_of_no_choices_are_those_of_balance() -> None:
    assert shares(torch.tensor([[0, 0], [3, 1]])).tolist() == [[1, 1], [1.5, 0.5]]


def test_counts_are_integers_of_every_expert() -> None:
    found = count(torch.tensor([[3, 1], [3, 0]]), 5)
    assert found.tolist() == [1, 1, 0, 2, 0] and found.dtype == torch.int64
