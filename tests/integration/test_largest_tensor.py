"""With a vocabulary of 128,256 no tensor of the logits of all tokens exists, on any path through the head.

Of a step and a validation the result of every operator is watched, with what is computed again and the
backward. The logits of a chunk are the largest: the matrices of the vocabulary have fewer rows than a chunk
has tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import meshes
from tests.helpers import in_layout, run_world
from tests.mesh_runs import configure
from tests.training import small_trainer
from toolkit.distributed.dtensor import local

VOCABULARY, DIM, CHUNK = 128_256, 32, 40
SIZES: meshes.Settings = {
    "model.vocab_size": VOCABULARY,
    "model.dim": DIM,
    "model.n_layers": 2,
    "training.loss_chunk_tokens": CHUNK,
    "training.steps": 1,
    "validation.freq": 1,
    **meshes.WORDS["float32"],
}
LAYOUTS = {
    "shard2": 1,
    "shard2 AC-full tied": 1,
    "shard2 accumulate3 freeze-last": 1,  # the head is frozen
    "shard2 lora": 1,
    "shard2 dpo": 1,
    "shard2 classification": 1,
    "cp2": 1,
    "pp2 1F1B": 1,
    "tp2": 2,
    "tp2 tied dpo": 2,
    "tp2 whole-logits": 1,
    "tp2 classification": 2,
}
"""The number of parts into which tensor parallelism cuts logits, too."""


class Largest(TorchDispatchMode):
    """The most numbers of a rank's part of a result, and the most rows of one over the vocabulary."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.vocabulary, self.numbers, self.rows = vocabulary, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                tensor = local(tensor)
                self.numbers = max(self.numbers, tensor.numel())
                if tensor.ndim and tensor.shape[-1] == self.vocabulary:
                    self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return result


def _run(folder: str, layout: str) -> dict[str, int]:
    samples = 8 * meshes.accumulation(layout)  # as few as have more than three chunks a micro-batch
    with (
        mock.patch.dict(meshes.PLAIN, SIZES),
        mock.patch("tests.mesh_runs.STEPS", 1),
        mock.patch("tests.meshes.SAMPLES", samples),
    ):
        trainer = small_trainer(configure(folder, layout))
    tokens = trainer.config.training.local_batch_size * trainer.config.training.seq_len
    with Largest(VOCABULARY // LAYOUTS[layout]) as seen:
        trainer.train()
    assert [record["step"] for record in trainer.history if "validation_loss" in record] == [1]
    return {"numbers": seen.numbers, "rows": seen.rows, "tokens": tokens}


def _world(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {}
    for layout in LAYOUTS:
        with in_layout(layout):
            found[layout] = _run(folder, layout)
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("largest")
    for layout in ("one", "one dpo", "one classification"):  # writes the corpora
        configure(Path(folder), layout)
    return run_world(_world, 2, str(folder), timeout=170)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_of_all_logits_exists(world: list[dict[str, Any]], layout: str) -> None:
    classifies = "classification" in layout
    for rank in world:
        found = rank[layout]
        assert found["tokens"] > 3 * CHUNK
        assert found["numbers"] <= CHUNK * VOCABULARY // LAYOUTS[layout]
        assert found["rows"] <= CHUNK
    # They were seen, by the rank that has the head: the limit is not of something else.
    assert max(rank[layout]["rows"] for rank in world) == (0 if classifies else CHUNK)


def test_all_logits_at_once_are_seen(tmp_path: Path) -> None:
    """The test above would find them."""
    [found] = run_world(_without_chunks, 1, str(tmp_path))
    assert found["rows"] >= found["tokens"] and found["numbers"] >= found["tokens"] * VOCABULARY


def _without_chunks(folder: str) -> dict[str, int]:
    with mock.patch.dict(SIZES, {"training.loss_chunk_tokens": 0}), mock.patch.dict(LAYOUTS, one=1):
        return _run(folder, "one")
