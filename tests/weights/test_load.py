"""Weights into sharded models: every layout has the tensors of the files, and computes what others did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.weights.stories import (
    FORMS,
    empty_model,
    needs_assets,
    open_form,
    recorded_loss,
    reference,
    run,
)
from toolkit.weights.load import load_weights

TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"fsdp": {}, "tp": TP, "pp": PP},
    4: {
        "fsdp": {},
        "fsdp tp": TP,
        "pp tp": TP | PP,
        "replicated": {"data_parallel_replicate_degree": 2},
    },
}


def fill(form: str, layout: dict[str, Any], *, broadcast: bool = False, dtype: str = "float32") -> Any:
    """(the source, a model of that layout with its weights)."""
    source = open_form(form)
    execution = empty_model(source.args, layout, dtype=dtype)
    for _, parameter in [*execution.named_parameters(), *execution.copies()]:
        parameter.data.fill_(float("nan"))
    tensors = dict(execution.named_parameters())
    seen = None if broadcast and dist.get_rank() else source
    load_weights(seen, tensors, broadcast_from_rank_0=broadcast)
    execution.refresh_copies(tensors, dict(execution.copies()))
    return source, execution


def differing(source: Any, execution: Any) -> list[str]:
    """Names of this rank's parameters that are not those of the files to the last bit."""
    wrong = []
    for name, parameter in [*execution.named_parameters(), *execution.copies()]:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(whole, source.read(name).to(whole.dtype)):
            wrong.append(name)
    return wrong


def compare(form: str, layout: dict[str, Any], *, losses: bool) -> dict[str, Any]:
    """On this rank: tensors that differ, and how far logits and the mean loss are from those recorded."""
    source, execution = fill(form, layout)
    result: dict[str, Any] = {"differ": differing(source, execution)}
    ids, logits = reference(form)
    even = ids.shape[1] // 2 * 2  # tensor parallelism splits sequences by two
    out = run(execution, ids[:, :even])
    if out is not None:
        theirs = logits[: len(logits) - (ids.shape[1] - even)]
        result["logits"] = (out[0, -len(theirs) :] - theirs).abs().max().item()
    if losses:
        loss, tokens, labels = recorded_loss(form)
        total = run(execution, tokens, labels)
        if total is not None:
            result["loss"] = abs(total.item() / (labels >= 0).sum().item() - loss)
    return result


def on_every_layout() -> dict[str, dict[str, Any]]:
    return {
        f"{form} {name}": compare(form, layout, losses=form == "stories260K/hf")
        for form in FORMS
        for name, layout in LAYOUTS[dist.get_world_size()].items()
    }


@needs_assets
@pytest.mark.parametrize("size", LAYOUTS)
def test_trained_models_compute_on_every_layout_what_others_computed_with_them(size: int) -> None:
    ranks = run_world(on_every_layout, size, timeout=170)
    for case in ranks[0]:
        assert all(rank[case]["differ"] == [] for rank in ranks), case
        for what in ("logits", "loss"):
            found = [rank[case][what] for rank in ranks if what in rank[case]]
            assert bool(found) == (what == "logits" or case.startswith("stories260K/hf")), case
            assert all(distance < 5e-5 for distance in found), (case, what, found)
