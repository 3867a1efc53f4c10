"""Tensor parallelism: the gradients of one process, what ranks store and send, and what they are handed.

fp64, where layouts differ by the order of sums alone, some 1e-15; a share that is not added, or added
twice, is at least 1e-2.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.meshes import SINCE_2_13
from tests.models.small_llama import small
from tests.parallel.sharded import (
    BATCH,
    EAGER,
    EXACT,
    FULL,
    KEEP_ALL,
    Collectives,
    changed,
    fill,
    furthest,
    gradients,
    plain_gradients,
    sharded,
)
from toolkit.config.parallelism import Compile
from toolkit.loss import token_losses
from toolkit.models.common.decoder import Decoder, FeedForward
from toolkit.models.parameters import table
from toolkit.optim.grad_clip import global_norm
from toolkit.optim.optimizer_in_backward import StepInBackward
from toolkit.parallel.autograd_collectives import gather, reduce_scatter
from toolkit.parallel.tensor_parallel import _gather_input_class, apply_tensor_parallel
from toolkit.parallel.vocabulary_parallel import vocabulary_parallel_losses
from toolkit.planner.allocations import Allocations

CLOSE = 1e-12
TP = 2
# A vocabulary that divides by tp: preflight and plan refuse others.
UNTIED = small("llama3.1", n_layers=2, vocab_size=308)
TIED = small("llama3.2", n_layers=2, vocab_size=308)
TOKENS, LABELS = BATCH
LAYERS = UNTIED.n_layers


def _far(found: Tensor, expected: Tensor) -> float:
    assert type(found) is Tensor and found.dtype == expected.dtype and found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()


# What each collective is, on tensors of their own


def _collective(name: str, rows: int, dim: int) -> float:
    """The greatest error of a forward and its gradient, of numbers that differ from rank to rank."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(rows)
    wholes = torch.randn(TP, rows, 4, 6, generator=generator, dtype=torch.float64)
    parts = torch.randn(TP, rows, 4, 6, generator=generator, dtype=torch.float64).chunk(TP, dim + 1)[0]
    joined, summed = torch.cat(list(parts), dim), wholes.sum(0).chunk(TP, dim)[rank]
    function, taken, given = (gather, parts, wholes) if name == "gather" else (reduce_scatter, wholes, parts)
    forward, backward = (joined, summed) if name == "gather" else (summed, joined)
    mine = taken[rank].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out = function(mine, dim, group)
    out.backward(given[rank])
    assert mine.grad is not None
    return max(_far(out.detach(), forward), _far(mine.grad, backward))


def _loss(labels: str, dtype: torch.dtype, scale: float) -> tuple[float, float]:
    """How far the split sum and its gradient are from those of whole logits in fp64."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(20, 50, generator=generator, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(50, (20,), generator=generator)
    targets[{"some": slice(0, None, 3), "all": slice(None), "none": slice(0)}[labels]] = -100
    whole = logits.double().clone().requires_grad_()
    expected = token_losses(whole, targets).sum()
    (expected * 0.7).backward()
    part = logits.chunk(TP, 1)[rank].clone().requires_grad_()
    found = vocabulary_parallel_losses(part, targets, first=rank * 25, group=group).sum()
    (found * 0.7).backward()
    assert part.grad is not None and whole.grad is not None
    assert found.dtype == torch.promote_types(dtype, torch.float32) and part.grad.dtype == dtype
    greatest = whole.grad.abs().max().item() or 1.0
    far = (part.grad - whole.grad.chunk(TP, 1)[rank]).abs().max().item() / greatest
    return abs(found.item() - expected.item()) / (expected.item() or 1.0), far


# The model


def _model(
    args: Any, *, loss_parallel: bool = True, again: bool = True, checkpointing: str = "none", **options: Any
) -> Decoder:
    how = changed(EXACT, disable_loss_parallel=not loss_parallel, tensor_parallel_recompute_allgather=again)
    mode = FULL if checkpointing == "full" else KEEP_ALL
    return sharded(args, how, tp=dist.get_world_size(), checkpointing=mode, **options)


def _gradients(tied: bool, loss_parallel: bool, chunk: int, checkpointing: str) -> float:
    args = TIED if tied else UNTIED
    options = {"loss_parallel": loss_parallel, "loss_chunk_tokens": chunk, "checkpointing": checkpointing}
    model = _model(args, **options)
    model(TOKENS, labels=LABELS).backward()
    return furthest(gradients(model), plain_gradients(args))


def _logits(tied: bool) -> float:
    """Without labels, and the gradients of a loss that is taken from them."""
    args = TIED if tied else UNTIED
    logits = _model(args)(TOKENS)
    expected = fill(Decoder(args).double())(TOKENS)
    return _far(logits.detach(), expected.detach())


def _types() -> set[str]:
    """Types of all that a module is handed or hands out, and of all gradients that pass."""
    seen: set[str] = set()

    def look(_: nn.Module, taken: Any, given: Any) -> None:
        for value in (*taken, *(given if isinstance(given, tuple) else (given,))):
            if isinstance(value, Tensor):
                seen.add(type(value).__name__)

    for checkpointing in ("none", "full"):
        model = _model(UNTIED, checkpointing=checkpointing)
        for module in model.modules():
            module.register_forward_hook(look)
            module.register_full_backward_hook(look)
        model(TOKENS, labels=LABELS).backward()
        model(TOKENS)
    return seen


def _stored() -> dict[str, float]:
    """For each parameter, the part that this rank has."""
    model = _model(UNTIED)
    parts = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        parts[name] = parameter._local_tensor.numel() / parameter.numel()
    return parts


def _sent(checkpointing: str, loss_parallel: bool, again: bool) -> dict[str, Counter[str]]:
    """Collectives of an evaluation without labels, and of forward and backward of a step."""
    model = _model(
        UNTIED, checkpointing=checkpointing, loss_chunk_tokens=96, loss_parallel=loss_parallel, again=again
    )
    counts = {}
    with torch.no_grad():
        model(TOKENS)
        with Collectives() as sent:
            model(TOKENS)
        counts["logits"] = sent.counts
    with Collectives() as sent:
        loss = model(TOKENS, labels=LABELS)
    counts["forward"] = sent.counts
    with Collectives() as sent:
        loss.backward()
    counts["backward"] = sent.counts
    return {
        moment: Counter({name: n for name, n in found.items() if name in COUNTED})
        for moment, found in counts.items()
    }


COUNTED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
"""Operations by which tensor parallelism sends; FSDP's own have other names."""


def _kept(backend: str, again: bool) -> int:
    """Bytes of activations that live between forward and backward; compiled, those that autograd is given."""
    compiling = Compile(enable=True, backend=backend) if backend else EAGER
    model = _model(UNTIED, again=again, compiling=compiling)
    if not backend:
        with torch.no_grad():
            model(TOKENS)  # what is made once for all steps, as rotations are
        with Allocations({}) as made:
            loss = model(TOKENS, labels=LABELS)
            gc.collect()  # what only cycles refer to is not kept
        kept = made.live_bytes(["activations"])
    else:
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(TOKENS, labels=LABELS)
        kept = sum(saved.values())
    loss.backward()
    return kept


def _copies(rows: int) -> int:
    """Concatenations in a collective and its backward: copies of all hidden states."""
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(rows, 8, 6, requires_grad=True)
    with _Concatenations() as copies:
        out = reduce_scatter(gather(x, 1, group), 1, group)
        out.sum().backward()
    assert not out._is_view(), "FSDP warns of views that a unit returns"
    return copies.counts["cat"]


class _Concatenations(Collectives):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def _saved_by_loss() -> int:
    """The numbers that a loss of 20 tokens keeps for backward, of the logits that this rank has."""
    group = dist.group.WORLD
    assert group is not None
    logits = torch.randn(20, 25, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        vocabulary_parallel_losses(logits, torch.arange(20), first=0, group=group)
    return sum(numel for numel in kept if numel >= logits.numel())


def _updated(in_backward: bool) -> tuple[list[Tensor], float]:
    """The parts of the parameters after a step, and the norm of its gradients."""
    model = _model(TIED)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_backward:
        optimizer = StepInBackward(optimizer)
    model(TOKENS, labels=LABELS).backward()
    device = torch.device("cpu")
    norm = (
        optimizer.gradient_norm(device=device)
        if isinstance(optimizer, StepInBackward)
        else global_norm(list(model.parameters()), device=device)
    )
    optimizer.step()
    parameters = list(model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters)
    return [parameter._local_tensor for parameter in parameters], norm.item()  # type: ignore[attr-defined]


def _same_in_backward() -> bool:
    (early, early_norm), (late, norm) = _updated(True), _updated(False)
    return all(map(torch.equal, early, late)) and abs(early_norm / norm - 1) < CLOSE


def _refused(plan: dict[str, str], **shape: int) -> str:
    with torch.device("meta"):
        model = Decoder(small(n_layers=1, **{"vocab_size": 308, **shape}))
    try:
        apply_tensor_parallel(model, plan, init_device_mesh("cpu", (TP,)))
    except ValueError as error:
        return str(error)
    return ""


COLLECTIVES = [
    (name, rows, dim)
    for name in ("gather", "reduce_scatter")
    for rows, dim in ((2, 0), (1, 1), (3, 1), (1, 2), (3, 2))
]
# The large ones overflow exp() unless shifted by the greatest logit of all ranks.
LOSSES = [
    *product(("some", "none", "all"), (torch.float64, torch.float32, torch.bfloat16), (1.0,)),
    ("some", torch.float64, 1e3),
]
LOSS_CLOSE = {torch.float64: (CLOSE, CLOSE), torch.float32: (1e-6, 1e-6), torch.bfloat16: (1e-6, 2**-8)}
"""Limits of sum and gradient: rounding of the precision in which each is handed out."""
# Tied, logits split in the loss, tokens of a chunk of the 192, activation checkpointing.
MODELS = [
    (False, True, 0, "none"),
    (True, True, 0, "full"),
    (False, True, 33, "op"),
    (True, False, 33, "none"),
    (False, False, 0, "none"),
]
SENT = [*product(("none", "full"), (True, False), (True,)), ("none", True, False)]

KEPT = list(product(("", "aot_eager"), (False, True)))


def _world() -> dict[str, Any]:
    plan = table(small()).tensor_plan()
    without = {name: style for name, style in plan.items() if name != "layers.0.ffn_norm"}

    def each(check: Callable[..., Any], cases: list[Any]) -> dict[Any, Any]:
        return {case: check(*case) for case in cases}

    return {
        "collectives": each(_collective, COLLECTIVES),
        "losses": each(_loss, LOSSES),
        "gradients": each(_gradients, MODELS),
        "logits": max(_logits(tied) for tied in (False, True)),
        "types": _types(),
        "stored": _stored(),
        "sent": each(_sent, SENT),
        "kept": each(_kept, KEPT),
        "copies": [_copies(rows) for rows in (1, 3)],
        "saved": _saved_by_loss(),
        "in backward": _same_in_backward(),
        "refused": [_refused(without), _refused(plan, vocab_size=307), _refused(plan, ffn_dim=95)],
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_world(_world, TP)


@pytest.mark.parametrize("case", COLLECTIVES, ids=str)
def test_collectives_and_their_gradients(ranks: list[Any], case: Any) -> None:
    assert max(rank["collectives"][case] for rank in ranks) < CLOSE


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_the_loss_of_split_logits_is_that_gather_input_class_ones(ranks: list[Any], case: Any) -> None:
    for rank in ranks:
        far, gradient_far = rank["losses"][case]
        close, gradient_close = LOSS_CLOSE[case[1]]
        assert far <= close and gradient_far <= gradient_close


def test_the_loss_keeps_one_number_a_logit(ranks: list[Any]) -> None:
    assert [rank["saved"] for rank in ranks] == [20 * 25] * TP


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_gradient_is_that_of_one_process(ranks: list[Any], case: Any) -> None:
    assert max(rank["gradients"][case] for rank in ranks) < CLOSE


def test_logits_are_whole_where_there_are_no_labels(ranks: list[Any]) -> None:
    assert max(rank["logits"] for rank in ranks) < CLOSE


def test_modules_hand_one_another_plain_tensors(ranks: list[Any]) -> None:
    assert [rank["types"] for rank in ranks] == [{"Tensor"}] * TP


def test_all_but_the_norms_is_stored_in_parts(ranks: list[Any]) -> None:
    for rank in ranks:
        assert len(rank["stored"]) == 9 * LAYERS + 3
        for name, part in rank["stored"].items():
            assert part == (1 if name.endswith("norm.weight") else 1 / TP), name


@pytest.mark.parametrize(("checkpointing", "loss_parallel", "again"), SENT)
def test_what_is_sent(ranks: list[Any], checkpointing: str, loss_parallel: bool, again: bool) -> None:
    chunks, ends = 2, 1
    gathered_again = 2 * LAYERS if again or checkpointing == "full" else 0
    scattered_again = 2 * LAYERS if checkpointing == "full" else 0
    # Attention and feed-forward each gather once and scatter once; so do the head and the embedding.
    whole = ends + 2 * LAYERS
    reduced, logits = (2 * chunks, 0) if loss_parallel else (0, chunks)
    norms = 2 * LAYERS + 1
    expected = {
        "logits": (whole + 1, whole, 0),
        "forward": (whole + logits, whole, reduced),
        # Each chunk's logits are computed again.
        "backward": (whole + logits + gathered_again, whole + scattered_again, reduced + norms),
    }
    for rank in ranks:
        for moment, counts in expected.items():
            found = rank["sent"][checkpointing, loss_parallel, again][moment]
            assert tuple(found[name] for name in COUNTED) == counts, moment


def test_of_what_blocks_gather_a_piece_is_kept(ranks: list[Any]) -> None:
    rows, length = TOKENS.shape
    whole = rows * length * UNTIED.dim * 8
    for rank in ranks:
        eager, compiled = (
            rank["kept"][backend, False] - rank["kept"][backend, True] for backend in ("", "aot_eager")
        )
        assert eager == 2 * LAYERS * whole * (1 - 1 / TP)
        # A compiler may find the piece in what it keeps besides; torch 2.11's keeps the whole.
        assert compiled >= (eager if SINCE_2_13 else 0)


class Rebinding(FeedForward):
    """A feed-forward that lets go of its argument."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        caller = sys._getframe(1).f_locals.values()
        self.held = any(value is x_BSD for value in caller)
        gate, x_BSD = self.w1(x_BSD), self.w3(x_BSD)
        x_BSD = F.silu(gate) * x_BSD
        return self.w2(x_BSD)


def test_a_forward_may_let_go_of_what_was_gathered() -> None:
    """It stays, or a tensor that takes its place would be taken for it. Before Python 3.12 any call holds its
    arguments."""
    module: Any = Rebinding(16, 16).double()
    own = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    inputs = own, *module.parameters()
    layout = SimpleNamespace(split=True, gather=lambda x: torch.cat([x, x * 0.5], 1))
    expected = torch.autograd.grad(module(layout.gather(own)).square().sum(), inputs)
    module.__class__, module.layout, module.recompute_gather = _gather_input_class(Rebinding), layout, True
    found = torch.autograd.grad(module(own).square().sum(), inputs)
    assert module.held and max(map(_far, found, expected)) < CLOSE


def test_a_single_sequence_is_never_copied(ranks: list[Any]) -> None:
    assert [rank["copies"] for rank in ranks] == [[0, 4]] * TP


def test_updates_in_backward_are_those_after_it(ranks: list[Any]) -> None:
    assert all(rank["in backward"] for rank in ranks)


def test_a_plan_that_leaves_something_out_or_does_not_divide_is_refused(ranks: list[Any]) -> None:
    for rank in ranks:
        left_out, vocabulary, hidden = rank["refused"]
        assert left_out == "the tensor-parallel plan has no module of layers.0.ffn_norm.weight"
        assert vocabulary == "tok_embeddings.weight: dimension 0 of size 307 on 2 ranks"
        assert hidden == "layers.0.feed_forward.w1.weight: dimension 0 of size 95 on 2 ranks"
