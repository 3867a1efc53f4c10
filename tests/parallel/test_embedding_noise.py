"""The noise of NEFTune: its size, and that no layout changes it. Training on meshes: tests/meshes.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toolkit.parallel.embedding_noise import EmbeddingNoise, document_lengths
from toolkit.parallel.sequence_shards import SequenceShards

DIM = 8


class _Tp:
    def __init__(self, rank: int, size: int):
        self.get_local_rank, self.size = (lambda: rank), (lambda: size)


def _noise(
    *,
    dp: tuple[int, int] = (0, 1),
    shards: Any = None,
    tp: Any = None,
    interleaved: bool = False,
    step: int = 1,
) -> EmbeddingNoise:
    mesh: Any = SimpleNamespace(dp_rank=dp[0], dp_size=dp[1], tp=tp)
    noise = EmbeddingNoise(5.0, mesh, shards, seed=3, interleaved=interleaved)
    noise.step = step
    return noise


def _of(noise: EmbeddingNoise, batches: list[dict[str, Any]], split: int = 1) -> Tensor:
    """Return what is added to embeddings of zeros, in all micro-batches."""
    noise.begin(batches)
    added = []
    for batch in batches:
        rows, length = batch["tokens"].shape
        added.append(noise(nn.Embedding(1, 1), (batch["tokens"],), torch.zeros(rows, length // split, DIM)))
    return torch.cat(added)


def _batch(rows: int, length: int, documents: Tensor | None = None) -> dict[str, Any]:
    return {"tokens": torch.zeros(rows, length, dtype=torch.int64), "documents": documents}


def test_a_row_of_one_document_has_the_noise_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    neftune = pytest.importorskip("transformers.integrations.neftune")
    monkeypatch.setattr(Tensor, "uniform_", lambda x, low, high, generator=None: x.fill_(high))
    embedding = nn.Embedding(10, DIM)
    embedding.neftune_noise_alpha = 5.0
    output = torch.zeros(2, 20, DIM)
    theirs = neftune.neftune_post_forward_hook(embedding.train(), None, output.clone())
    for documents in (None, torch.zeros(2, 20, dtype=torch.int32)):
        torch.testing.assert_close(_of(_noise(), [_batch(2, 20, documents)]), theirs)


def test_noise_is_uniform_up_to_what_a_document_s_length_gives() -> None:
    lengths = [100, 380, 120]
    documents = torch.repeat_interleave(torch.tensor([0, 1, -1]), torch.tensor(lengths))[None]
    [found] = _of(_noise(), [_batch(1, 600, documents)])
    for part, length in zip(found.split(lengths), lengths, strict=True):
        most = 5.0 / math.sqrt(length * DIM)
        assert 0.98 * most < part.max() <= most and -most <= part.min() < -0.98 * most
        assert part.std().item() == pytest.approx(most / math.sqrt(3), rel=0.1)
    assert document_lengths(documents)[0].tolist() == [float(it) for it in lengths for _ in range(it)]


def test_noise_differs_between_samples_steps_and_positions() -> None:
    one, other = (_of(_noise(step=step), [_batch(2, 600)]) for step in (1, 2))
    values = torch.cat([one.flatten(), other.flatten()])
    assert len(values.unique()) > 0.99 * len(values)
    assert torch.equal(one, _of(_noise(), [_batch(2, 600)]))


def test_without_a_step_there_is_none() -> None:
    noise = _noise()
    _of(noise, [_batch(2, 8)])
    x = torch.zeros(2, 8, DIM)
    assert noise(nn.Embedding(1, 1), (torch.zeros(2, 8),), x) is x


def test_ranks_and_micro_batches_share_the_noise_of_one_batch() -> None:
    expected = _of(_noise(), [_batch(12, 16)])
    parts = [_of(_noise(dp=(rank, 2)), [_batch(2, 16)] * 3) for rank in range(2)]
    assert torch.equal(torch.cat(parts), expected)
    for rank in range(2):
        dealt = _of(_noise(dp=(rank, 2), interleaved=True), [_batch(2, 16)] * 3)
        assert torch.equal(dealt, expected.view(3, 2, 2, 16, DIM)[:, rank].flatten(0, 1))


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_shards_of_a_sequence_have_their_part(balanced: bool, tp: int) -> None:
    """Across the blocks of positions."""
    length, ranks = 1200, 3
    documents = torch.arange(length)[None] // 500
    expected = _of(_noise(), [_batch(1, length, documents)])
    for rank in range(ranks):
        shards = SequenceShards(rank, ranks, balanced=balanced)
        places = shards.shard(torch.arange(length)[None])[0]
        for tp_rank, of_rank in enumerate(places.chunk(tp)):
            noise = _noise(shards=shards, tp=_Tp(tp_rank, tp) if tp > 1 else None)
            found = _of(noise, [_batch(1, length // ranks, documents)], split=tp)
            assert torch.equal(found, expected[:, of_rank])
