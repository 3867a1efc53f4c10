"""Weights into sharded models: every layout has the tensors of the files, and computes what others did."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.weights.stories import (
    ASSETS,
    FORMS,
    empty_model,
    needs_assets,
    open_form,
    recorded_loss,
    reference,
    run,
)
from toolkit.checkpoint.manager import CheckpointManager
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError
from toolkit.weights.convert import convert, prepare
from toolkit.weights.export import export_hf
from toolkit.weights.load import load_weights, open_on_all_ranks
from toolkit.weights.safetensors import SafetensorsFolder

TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
LARGE = ["stories15M/hf"]
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
    model_parts = empty_model(source.args, layout, dtype=dtype)
    for _, parameter in [*model_parts.named_parameters(), *model_parts.tied_copies()]:
        parameter.data.fill_(float("nan"))
    tensors = dict(model_parts.named_parameters())
    seen = None if broadcast and dist.get_rank() else source
    load_weights(seen, tensors, broadcast_from_rank_0=broadcast)
    model_parts.refresh_tied_copies(tensors, dict(model_parts.tied_copies()))
    return source, model_parts


def differing(source: Any, model_parts: Any) -> list[str]:
    """Names of this rank's parameters that are not those of the files to the last bit."""
    wrong = []
    for name, parameter in [*model_parts.named_parameters(), *model_parts.tied_copies()]:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(whole, source.read(name).to(whole.dtype)):
            wrong.append(name)
    return wrong


def changed_on_the_way(form: str, source: Any, model_parts: Any, folder: Path) -> list[str]:
    """Tensors that are not bit for bit those that were published, after a checkpoint of this model has become
    files of Hugging Face, written by all ranks, and of Meta."""
    model = form.partition("/")[0]
    tensors = {f"model.{name}": tensor for name, tensor in model_parts.named_parameters()}
    step = CheckpointManager(folder).save(1, tensors, {"model": asdict(source.args)})
    export_hf(step, folder / "hf", dtype=torch.float32, tokenizer_path=None, ranks=Ranks())
    if dist.get_rank():
        return []
    convert(prepare("dcp-to-meta", step, folder / "meta"))
    files = {"hf": "model.safetensors", "meta": "consolidated.00.pth"}
    wrong = []
    for kind, file in files.items():
        if (ASSETS / model / kind).exists():
            read = load_file if kind == "hf" else partial(torch.load, weights_only=True)
            there, here = read(ASSETS / model / kind / file), read(folder / kind / file)
            wrong += [f"{kind} {name}" for name in there.keys() ^ here.keys()]
            wrong += [
                f"{kind} {name}" for name in there.keys() & here.keys() if not same(there[name], here[name])
            ]
    return wrong


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def compare(form: str, layout: dict[str, Any], folder: Path, *, thorough: bool) -> dict[str, Any]:
    """On this rank: tensors that change on a way out of this layout, and how far logits are from those
    recorded; if ``thorough`` also the mean loss of many stories, and tensors that are not the files'."""
    source, model_parts = fill(form, layout)
    result: dict[str, Any] = {"differ": differing(source, model_parts) if thorough else []}
    result["changed"] = changed_on_the_way(form, source, model_parts, folder)
    ids, logits = reference(form)
    even = ids.shape[1] // 2 * 2  # tensor parallelism splits sequences by two
    out = run(model_parts, ids[:, :even])
    if out is not None:
        theirs = logits[: len(logits) - (ids.shape[1] - even)]
        result["logits"] = (out[0, -len(theirs) :] - theirs).abs().max().item()
    if thorough:
        loss, tokens, labels = recorded_loss(form)
        total = run(model_parts, tokens, labels)
        if total is not None:
            result["loss"] = abs(total.item() / (labels >= 0).sum().item() - loss)
    return result


def on_every_layout(base: str, forms: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {
        f"{form} {name}": compare(form, layout, Path(base, form, name), thorough=form == "stories260K/hf")
        for form in forms
        for name, layout in LAYOUTS[dist.get_world_size()].items()
    }


@needs_assets
@pytest.mark.parametrize(
    ("size", "forms"),
    [
        pytest.param(1, FORMS, id="1"),
        pytest.param(2, FORMS, id="2"),
        pytest.param(4, [form for form in FORMS if form not in LARGE], id="4", marks=pytest.mark.slow),
        pytest.param(4, LARGE, id="4 large", marks=pytest.mark.exhaustive),
    ],
)
def test_trained_models_compute_on_every_layout_what_others_computed_with_them(
    size: int, forms: Sequence[str], tmp_path: Path
) -> None:
    """And leave it as they have come."""
    ranks = run_world(on_every_layout, size, str(tmp_path), forms)
    for case in ranks[0]:
        assert all(rank[case]["differ"] == [] for rank in ranks), case
        assert ranks[0][case]["changed"] == [], case
        for what in ("logits", "loss"):
            found = [rank[case][what] for rank in ranks if what in rank[case]]
            assert bool(found) == (what == "logits" or case.startswith("stories260K/hf")), case
            assert all(distance < 5e-5 for distance in found), (case, what, found)


def altered(folder: Path, change: Any) -> Path:
    """The files of stories260K, their tensors as ``change`` leaves them."""
    shutil.copytree(ASSETS / "stories260K/hf", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def other_ways(folders: dict[str, Path]) -> dict[str, Any]:
    """By broadcast; with a cast; and what each of the ``folders`` is refused for."""
    found: dict[str, Any] = {}
    for name, layout in {"fsdp": {}, "tp": TP, "pp": PP}.items():
        source, model_parts = fill("stories260K/hf", layout, broadcast=True)
        found[f"broadcast {name}"] = differing(source, model_parts)
    source, model_parts = fill("stories260K/hf", TP, dtype="bfloat16")
    found["cast"] = differing(source, model_parts)
    cases = [(name, folder, PP) for name, folder in folders.items()]
    cases += [(f"untied {name}", folders["untied"], layout) for name, layout in LAYOUTS[2].items()]
    for name, folder, layout in cases:
        for broadcast in (False, True):
            model_parts = empty_model(source.args, layout)
            tensors = dict(model_parts.named_parameters())
            try:
                seen = open_on_all_ranks(
                    lambda folder=folder: SafetensorsFolder(folder), only_rank_0=broadcast
                )  # type: ignore[misc]
                if "cut" in name and seen is not None:  # after its header was read
                    (folder / "model.safetensors").write_bytes(b"")
                dist.barrier()
                load_weights(seen, tensors, broadcast_from_rank_0=broadcast)
                found[f"{name} {broadcast}"] = "loaded"
            except DataError as error:
                found[f"{name} {broadcast}"] = str(error)
    return found


@needs_assets
def test_broadcast_cast_and_what_does_not_fit(tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.9.mlp.up_proj.weight"] = tensors.pop("model.layers.4.mlp.up_proj.weight")

    def untie(tensors: dict[str, torch.Tensor]) -> None:
        """In one value, which one rank of two has."""
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, 0] += 1

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding[:8]])

    folders = {
        "names": altered(tmp_path / "names", rename),
        "vocabulary": altered(tmp_path / "vocabulary", widen),
        "absent": tmp_path / "absent",
        "cut": altered(tmp_path / "cut", lambda tensors: None),
        "untied": altered(tmp_path / "untied", untie),
    }
    first, second = run_world(other_ways, 2, folders)
    assert {case: found for case, found in first.items() if "broadcast" in case} == {
        f"broadcast {layout}": [] for layout in ("fsdp", "tp", "pp")
    }
    assert first["cast"] == second["cast"] == []
    for broadcast in (False, True):
        names = [*folders, *(f"untied {layout}" for layout in LAYOUTS[2])]
        messages = {name: first[f"{name} {broadcast}"] for name in names}
        assert messages == {name: second[f"{name} {broadcast}"] for name in names}  # alike on every rank
        assert "missing in the weights: layers.4.feed_forward.w3.weight" in messages["names"]
        assert "in the weights, but not in this model: model.layers.9.mlp.up_proj.weight" in messages["names"]
        assert (
            "tok_embeddings.weight (520, 64) in the weights, (512, 64) in the model" in messages["vocabulary"]
        )
        assert "--vocab-size" in messages["vocabulary"]
        assert "config.json" in messages["absent"]
        for layout in LAYOUTS[2]:
            assert 'set "tie_word_embeddings" to false' in messages[f"untied {layout}"]
            assert messages[f"untied {layout}"].count("differs") == 1
        assert "truncated" in messages["cut"] or "too early" in messages["cut"]
