"""A run saved on one mesh goes on on any other: parameters, moments, names and losses, through the trainer.

Everything in fp64: a mesh differs from another by the order of sums alone. No width of the feed-forward's
shards divides evenly.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.curves import few_tokens
from tests.helpers import run_world
from tests.meshes import SINCE_2_13
from tests.training import small_config, small_trainer
from toolkit.checkpoint.dcp_storage import read_metadata, tensor_entries
from toolkit.checkpoint.manifest import read_manifest, step_folder
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.trainer import Trainer

RANKS, STEPS, SAVED = 4, 4, 2
Settings = dict[str, Any]
Digests = dict[str, str]
Pair = tuple[str, str]


def _pipeline(schedule: str, **more: Any) -> Settings:
    ends = {f"pipeline_parallel_{end}_stage_less_layers": 0 for end in ("first", "last")}
    sizes = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2, **ends}
    return {"pipeline_parallel_schedule": schedule, **sizes, **more}


# The embedding alone on the first of four stages, norm and head on the last.
BARE = {"pipeline_parallel_first_stage_less_layers": 2, "pipeline_parallel_last_stage_less_layers": 1}
# Data parallelism takes what the others leave.
MESHES: dict[str, Settings] = {
    "fsdp": {},
    "pp tp": _pipeline("Interleaved1F1B", tensor_parallel_degree=2, **BARE),
    "hsdp": {"data_parallel_replicate_degree": 2},
    "pp cp": _pipeline("1F1B", context_parallel_degree=2),
    "tp": {"tensor_parallel_degree": 2},
}
if SINCE_2_13:
    MESHES["pp v-shaped"] = _pipeline("ZBVZeroBubble", fsdp_reshard_after_forward="never")
NAMES = list(MESHES)
OF_OTHER_WORLDS: dict[int, dict[str, Settings]] = {
    1: {"one": {}},
    2: {
        "fsdp of 2": {},
        "tp of 2": {"tensor_parallel_degree": 2},
        "cp of 2": {"context_parallel_degree": 2},
        "pp of 2": _pipeline("1F1B"),
    },
    8: {
        "fsdp of 8": {},
        "hsdp of 2 x 4": {"data_parallel_replicate_degree": 2},
        "fsdp of 4 tp": {"tensor_parallel_degree": 2},
        "pp fsdp tp": _pipeline("1F1B", tensor_parallel_degree=2),
        "pp tp cp": _pipeline("Interleaved1F1B", tensor_parallel_degree=2, context_parallel_degree=2),
    },
}
# Each mesh to the next, and one to itself.
CHAIN = list(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True)) + [(name, name) for name in NAMES[1:2]]


def _trainer(folder: Path, mesh: str, tied: bool, **checkpoint: Any) -> Trainer:
    settings = next(of_world[mesh] for of_world in (MESHES, *OF_OTHER_WORLDS.values()) if mesh in of_world)
    rows = min(4, 16 // dist.get_world_size())
    dtype = "float64"
    training = {"dtype": dtype, "mixed_precision_param": dtype, "mixed_precision_reduce": dtype}
    return small_trainer(
        small_config(
            folder,
            model=few_tokens(folder.parent)
            | {"vocab_size": 516, "dim": 32, "n_layers": 4, "ffn_dim": 50, "tie_embeddings": tied},
            training={"steps": STEPS, "seq_len": 32, "local_batch_size": rows, **training},
            lr_scheduler={"warmup_steps": 2},
            checkpoint={"enable": True, "interval": SAVED, **checkpoint},
            parallelism=settings,
        )
    )


def _digests(tensors: Mapping[str, Tensor]) -> Digests:
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in tensors.items()}
    return {name: hashlib.sha256(x.detach().numpy().tobytes()).hexdigest() for name, x in whole.items()}


def _state(trainer: Trainer, *, copies: bool = False) -> Digests:
    """Parameters and moments of this rank, whole; or those of its copies."""
    model_parts = trainer.model_parts
    named = list(model_parts.tied_copies() if copies else model_parts.named_parameters())
    return _digests({f"model.{name}": x for name, x in named} | optimizer_tensors(named, trainer.optimizer))


def _finish(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    losses = {record["step"]: record["loss"] for record in trainer.history}
    return {"losses": losses, "end": _state(trainer), "copies at the end": _state(trainer, copies=True)}


def _whole_run(folder: Path, mesh: str, tied: bool) -> dict[str, Any]:
    """All steps, with what was saved after the second."""
    trainer = _trainer(folder, mesh, tied)
    saved: dict[int, Digests] = {}
    save = trainer.checkpointer.manager.save

    def watched(step: int, tensors: Mapping[str, Tensor], run: Mapping[str, Any]) -> Path:
        saved[step] = _digests(tensors)
        return save(step, tensors, run)

    trainer.checkpointer.manager.save = watched  # type: ignore[method-assign]
    return _finish(trainer) | {"saved": saved[SAVED]}


def _resumed(folder: Path, source: Path, mesh: str, tied: bool) -> dict[str, Any]:
    path = step_folder(source / "checkpoint", SAVED)
    trainer = _trainer(folder, mesh, tied, initial_load_path=str(path), initial_load_model_only=False)
    loaded = {"loaded": _state(trainer), "copies": _state(trainer, copies=True)}
    return loaded | _finish(trainer)


def _world(folder: str, tied: bool, meshes: list[str], pairs: list[Pair]) -> dict[str, Any]:
    base = Path(folder)
    whole = {mesh: _whole_run(base / mesh, mesh, tied) for mesh in meshes}
    resumed = {
        (source, target): _resumed(base / f"{source} to {target}", base / source, target, tied)
        for source, target in pairs
    }
    return {"whole": whole, "resumed": resumed}


def _runs(tied: bool, pairs: list[Pair], folder: Path, timeout: float) -> list[dict[str, Any]]:
    return run_world(_world, RANKS, str(folder), tied, NAMES, pairs, timeout=timeout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meshes")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[dict[str, Any]]:
    return _runs(True, CHAIN, folder, timeout=380)


def _together(of_ranks: Iterable[Digests]) -> Digests:
    """Gather what the ranks hold, each thing on some of them, and where on several alike."""
    found: Digests = {}
    for digests in of_ranks:
        for name, digest in digests.items():
            assert found.setdefault(name, digest) == digest, name
    return found


def _stored(mesh: str, folder: Path) -> dict[str, tuple[Any, ...]]:
    """Shapes and types of what a mesh saved, by name."""
    saved = step_folder(folder / mesh / "checkpoint", SAVED)
    tensors = tensor_entries(read_metadata(saved, read_manifest(saved)["files"]))
    return {name: (tuple(tensor.size), tensor.properties.dtype) for name, tensor in tensors.items()}


def _check_resumed(
    source: str,
    target: str,
    saving: list[dict[str, Any]],
    loading: list[dict[str, Any]],
    *,
    tied: bool,
) -> None:
    """Compare what the ranks of a world that saved, and of one that loaded, returned."""
    whole = [rank["whole"][source] for rank in saving]
    resumed = [rank["resumed"][source, target] for rank in loading]
    loaded = _together(rank["loaded"] for rank in resumed)
    assert loaded == _together(rank["saved"] for rank in whole)
    copies = _together(rank["copies"] for rank in resumed)
    assert bool(copies) is (tied and target.startswith("pp"))
    assert copies.items() <= loaded.items()
    # Updated alike, a copy still is what it repeats.
    end = _together(rank["end"] for rank in resumed)
    assert _together(rank["copies at the end"] for rank in resumed).items() <= end.items()
    rest = {step: loss for step, loss in whole[0]["losses"].items() if step > SAVED}
    assert len(rest) == STEPS - SAVED
    if source == target:
        assert all(rank["losses"] == rest for rank in resumed)
        assert end == _together(rank["end"] for rank in whole)
    else:  # sums in another order
        assert all(rank["losses"] == pytest.approx(rest, rel=1e-10) for rank in resumed)


def test_every_mesh_saves_the_same_tensors(runs: list[dict[str, Any]], folder: Path) -> None:
    names = _stored("fsdp", folder)
    assert {"model.layers.3.attention.wk.weight", "optim.tok_embeddings.weight.exp_avg_sq"} <= names.keys()
    assert "model.output.weight" not in names  # it is tied
    for mesh in MESHES:
        assert _stored(mesh, folder) == names


@pytest.mark.parametrize(("source", "target"), CHAIN, ids=" to ".join)
def test_another_mesh_holds_what_was_saved_and_goes_on(
    source: str, target: str, runs: list[dict[str, Any]]
) -> None:
    _check_resumed(source, target, runs, runs, tied=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_pair_of_meshes(tied: bool, tmp_path: Path) -> None:
    pairs = list(product(MESHES, MESHES))
    runs = _runs(tied, pairs, tmp_path, timeout=1700)
    for source, target in pairs:
        _check_resumed(source, target, runs, runs, tied=tied)
    names = _stored("fsdp", tmp_path)
    assert ("model.output.weight" in names) is not tied
    assert all(_stored(mesh, tmp_path) == names for mesh in MESHES)


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_pair_of_world_sizes(tied: bool, tmp_path: Path) -> None:
    worlds = {RANKS: MESHES, **OF_OTHER_WORLDS}
    saving = {
        ranks: run_world(_world, ranks, str(tmp_path), tied, list(meshes), [], timeout=600)
        for ranks, meshes in worlds.items()
    }
    for target_ranks, targets in worlds.items():
        pairs = [
            (source, target)
            for source_ranks, sources in worlds.items()
            for source, target in product(sources, targets)
            if source_ranks != target_ranks
        ]
        # The groups of a run live as long as its process, with their threads.
        for some in (pairs[first : first + 10] for first in range(0, len(pairs), 10)):
            loading = run_world(_world, target_ranks, str(tmp_path), tied, [], some, timeout=600)
            for source, target in some:
                ranks = next(ranks for ranks, meshes in worlds.items() if source in meshes)
                _check_resumed(source, target, saving[ranks], loading, tied=tied)
