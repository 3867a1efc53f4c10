"""The load of experts over ranks: its counts and metrics, and the biases that balance it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import run_world
from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.models.small_llama import small, tokens_and_labels
from toolkit.config.training import MoE as Options
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.moe import BALANCE_LOSS, Z_LOSS, MoE
from toolkit.models.parameters import init_rule
from toolkit.parallel.expert_load import NAMES, ExpertLoad
from toolkit.parallel.init_weights import initialize
from toolkit.parallel.mesh import build_mesh

CPU = torch.device("cpu")
ARGS = small("experts", n_layers=3)  # of which the last two have experts, 8 each, 2 per token
COUNTS = torch.tensor([[4, 0, 9, 4, 4, 4, 3, 4], [8, 0, 0, 0, 0, 0, 0, 0]]).double()
BALANCED = torch.full((2, 8), 4.0).double()
ONE_SIDED = torch.stack([BALANCED[0], COUNTS[1]])
HALF = torch.tensor([[3, 0, 3, 0, 3, 0, 3, 0]] * 2).double()


def _model() -> Decoder:
    model = Decoder(ARGS)
    initialize(model.named_parameters(), 1, lambda name: init_rule(name, ARGS))
    for module in model.modules():
        if isinstance(module, MoE):
            assert module.expert_bias is not None
            module.expert_bias.zero_()
    return model


def _moes(model: Decoder) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def _biases(coefficient: float) -> list[list[Tensor]]:
    """Biases after each of two updates."""
    model = _model()
    load = ExpertLoad([model], build_mesh(CPU, dp_shard=2), Options(load_balance_coeff=coefficient))
    after = []
    for _ in range(2):
        load.update_biases(COUNTS)
        after.append([moe.expert_bias.clone() for moe in _moes(model) if moe.expert_bias is not None])
    return after


def _counted() -> tuple[list[list[int]], list[list[int]], Any]:
    """Counts of two micro-batches, what is left of them, and those of forced balance."""
    model, rank = _model(), torch.distributed.get_rank()
    tokens = tokens_and_labels(2, 8)[0][rank : rank + 1]
    load = ExpertLoad([model], build_mesh(CPU, dp_shard=2), Options())
    with torch.no_grad():
        model(tokens)  # outside of a step
        model.block_sums.counts = True
        model(tokens)
        model(tokens)
        found, left = load.take(CPU), load.take(CPU)
        load = ExpertLoad([model], build_mesh(CPU, dp_shard=2), Options(), balanced=True)
        model(tokens)
    return found.tolist(), left.tolist(), load.take(CPU).tolist()


def _shares_are_added() -> dict[str, list[float]]:
    """The balancing losses' counts, of as many as this rank's number and one, in each scope and mesh."""
    found = {}
    for scope in ("global_batch", "sequence"):
        options = Options(aux_loss_coeff=0.1, aux_loss_scope=scope)  # type: ignore[arg-type]
        for name, degrees in {"dp": {"dp_shard": 2}, "cp": {"cp": 2}, "tp": {"tp": 2}}.items():
            load = ExpertLoad([_model()], build_mesh(CPU, **degrees), options)
            assert load.losses.add_counts is not None
            own = torch.tensor([torch.distributed.get_rank() + 1.0])
            found[f"{scope} {name}"] = load.losses.add_counts(own).tolist()
    options = Options(aux_loss_coeff=0.1, aux_loss_scope="sequence")
    load = ExpertLoad([_model()], build_mesh(CPU, tp=2, ep=2), options)
    assert load.losses.add_counts is not None
    found["sequence tp ep"] = load.losses.add_counts(torch.ones(1)).tolist()
    return found


def _losses() -> list[Any]:
    """Names of losses, whether a pass is needed, and the shares before and after they are set."""
    mesh, found = build_mesh(CPU, dp_shard=2), []
    for options in (
        Options(),
        Options(z_loss_coeff=1e-3),
        Options(aux_loss_coeff=0.1),
        Options(aux_loss_coeff=0.1, aux_loss_scope="sequence"),
    ):
        model = _model()
        load = ExpertLoad([model], mesh, options)
        found.append((load.losses.names, load.needs_pass, [moe.losses is None for moe in _moes(model)]))
    load.set_shares(COUNTS)
    found.append([moe.losses.shares_E.tolist() for moe in _moes(model)])  # type: ignore[union-attr]
    load.set_shares(None)
    found.append([moe.losses.shares_E for moe in _moes(model)])  # type: ignore[union-attr]
    return found


def _metrics() -> list[list[float]]:
    load = ExpertLoad([_model()], build_mesh(CPU, dp_shard=2), Options())
    return [load.metrics(counts).tolist() for counts in (BALANCED, ONE_SIDED, HALF, torch.zeros(2, 8))]


def _all() -> dict[str, Any]:
    return {
        "biases": _biases(0.01),
        "kept": _biases(0.0),
        "counted": _counted(),
        "added": _shares_are_added(),
        "losses": _losses(),
        "metrics": _metrics(),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """Findings of each of two ranks."""
    return run_world(_all, 2)


def test_biases_move_as_in_torchtitan(found: list[dict[str, Any]]) -> None:
    """By a step of the sign of the mean minus the count (DeepSeek-V3), less the mean of the steps, so that
    the biases of a layer always sum to 0."""
    change = 0.01 * torch.sign(COUNTS.mean(1, keepdim=True) - COUNTS)
    assert change[0].tolist() == [0, 0.01, -0.01, 0, 0, 0, 0.01, 0]
    change = change - change.mean(1, keepdim=True)
    for rank in found:
        for updates, biases in enumerate(rank["biases"], 1):
            # Two roundings of fp32 of values below 0.03.
            torch.testing.assert_close(torch.stack(biases), (updates * change).float(), atol=1e-8, rtol=0)
            assert torch.stack(biases).sum(1).abs().max() < 1e-8


def test_a_coefficient_of_0_keeps_biases(found: list[dict[str, Any]]) -> None:
    assert not torch.stack(found[0]["kept"][1]).any()


def test_choices_are_counted_once_per_micro_batch_of_a_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        counts, left, balanced = rank["counted"]
        assert [sum(of_layer) for of_layer in counts] == [2 * 8 * 2] * 2
        assert left == [[0] * 8] * 2 and balanced == [[2] * 8] * 2
    assert found[0]["counted"][0] != found[1]["counted"][0], "each rank counts its own"


def test_counts_are_added_over_the_ranks_of_a_batch_or_sequence(found: list[dict[str, Any]]) -> None:
    for rank, own in zip(found, (1, 2), strict=True):
        assert rank["added"] == {
            "global_batch dp": [3],
            "global_batch cp": [3],
            "global_batch tp": [3],
            "sequence dp": [own],
            "sequence cp": [3],
            "sequence tp": [own],  # each has whole sequences, gathered
            "sequence tp ep": [2],
        }


def test_losses_are_those_of_the_options(found: list[dict[str, Any]]) -> None:
    *of_options, given, removed = found[0]["losses"]
    assert of_options == [
        ((), False, [True, True]),
        ((Z_LOSS,), False, [False, False]),
        ((BALANCE_LOSS,), True, [False, False]),
        ((BALANCE_LOSS,), False, [False, False]),
    ]
    assert given == [[1, 0, 2.25, 1, 1, 1, 0.75, 1], [8, 0, 0, 0, 0, 0, 0, 0]]
    assert removed == [None, None]


def test_metrics_are_those_of_the_worst_layer(found: list[dict[str, Any]]) -> None:
    assert NAMES == ("moe/max_load", "moe/load_entropy")
    balanced, one_sided, half, none = found[0]["metrics"]
    assert balanced == none == pytest.approx([1, 1])
    assert one_sided == pytest.approx([8, 0])
    assert half == pytest.approx([2, math.log(4) / math.log(8)])
