"""Sequences split over ranks: which tokens a rank has, and attention beside that to whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers import run_world
from tests.models.attention_cases import LENGTH, PACKED, PACKINGS, ROWS, attend, inputs, weighed
from tests.models.varlen_on_cpu import give_varlen_a_cpu_kernel
from tests.parallel.sharded import Collectives
from tests.training import small_config, small_trainer
from toolkit.models.common.attention import AttentionBackend, attention_backend
from toolkit.parallel.context_parallel import ContextParallelAttention
from toolkit.parallel.mesh import build_mesh
from toolkit.parallel.ring_attention import RingAttention
from toolkit.parallel.sequence_shards import SequenceShards

shards_of_all = st.builds(
    lambda size, balanced: [SequenceShards(rank, size, balanced) for rank in range(size)],
    st.integers(1, 8),
    st.booleans(),
)


@given(shards_of_all, st.integers(1, 3), st.integers(1, 4))
def test_each_token_is_on_one_rank_and_comes_back_to_its_place(
    shards: list[SequenceShards], rows: int, size: int
) -> None:
    sequences = torch.arange(rows * shards[0].chunks * size).view(rows, -1)
    cuts = [its.shard(sequences) for its in shards]
    assert torch.cat(cuts, dim=1).sort().values.equal(sequences)
    assert all(cut.equal(cut.sort().values) for cut in cuts)  # the causal order within a rank
    assert all(its.unshard(torch.cat(cuts)).equal(sequences) for its in shards)
    values = torch.stack([sequences, -sequences], dim=-1)
    assert shards[0].unshard(torch.cat([its.shard(values) for its in shards])).equal(values)


@given(shards_of_all, st.integers(1, 4))
def test_balanced_ranks_attend_to_equally_many_tokens(shards: list[SequenceShards], size: int) -> None:
    seen_by = torch.arange(1, shards[0].chunks * size + 1)[None]
    work = [int(its.shard(seen_by).sum()) for its in shards]
    if shards[0].balanced:
        assert len(set(work)) == 1
    else:
        assert work == sorted(set(work))  # the last rank has the most


def test_ranks_have_the_pieces_from_both_ends() -> None:
    sequence = torch.arange(16)[None]
    found = [SequenceShards(rank, 4).shard(sequence)[0].tolist() for rank in range(4)]
    assert found == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    plain = [SequenceShards(rank, 4, balanced=False).shard(sequence)[0].tolist() for rank in range(4)]
    assert plain == sequence.view(4, 4).tolist()


@dataclass(frozen=True)
class Case:
    backend: str
    size: int
    balanced: bool
    kv_heads: int = 2
    packing: int | None = 0
    """Which of ``PACKINGS``; None is whole rows."""
    window: int | None = None
    chunked: bool = False


CASES = [
    *(Case("sdpa", *them) for them in product((2, 4), (True, False), (8, 2), (0, None))),
    *(Case("blockwise", *them) for them in product((2, 4), (True, False), (8, 2), (0, 1, None))),
    *(Case("varlen", *them) for them in product((2, 4), (True, False), (2,), (0, 2))),
    *(Case("flash", size, balanced, 2, None) for size, balanced in product((2, 4), (True, False))),
    *(Case("ring", *them) for them in product((2, 4), (True, False), (8, 2), (0, 1, 2, None))),
    *(Case("flex", size, True, 2, packing) for size, packing in product((2, 4), (0, None))),
    *(
        Case(name, *them)
        for name in ("sdpa", "blockwise", "varlen", "ring")
        for them in product((2, 4), (True, False), (2,), (0, None), (3, 64))
    ),
    *(Case("ring", 4, True, 8, 2, window) for window in (1, 25, 26, 150)),
    *(
        Case(name, 4, True, 2, packing, window, chunked=True)
        for name in ("sdpa", "blockwise", "varlen", "flex", "ring")
        for packing, window in ((0, 30), (None, 64), (None, 150))
    ),
]

COUNTED = [Case("sdpa", 4, True), Case("sdpa", 2, True, 2, None), Case("ring", 4, True, 2, None)]


def _beside_whole(case: Case, mesh: DeviceMesh) -> float:
    """How far this rank's results and gradients are from its columns of those of whole sequences."""
    dtype = torch.float32 if case.backend == "flash" else torch.float64
    documents = None if case.packing is None else PACKINGS[case.packing]
    shards = SequenceShards(mesh.get_local_rank(), case.size, case.balanced)
    attention = _attention(case, mesh)
    trained = case.backend != "flex"  # which has no backward on CPU
    whole = [x.requires_grad_(trained) for x in inputs(8, case.kv_heads, dtype)]
    mine = [shards.shard(x.detach()).requires_grad_(trained) for x in whole]
    mask = attention.mask(documents, ROWS, LENGTH // case.size, torch.device("cpu"))
    found, expected = (
        attention(*mine, mask),
        attend("sdpa", whole, documents, window=case.window, chunked=case.chunked),
    )
    distances = [found - shards.shard(expected)]
    if trained:
        # Of a rank, its share of the sum over the sequence: the ranks add up the gradients.
        truth = torch.autograd.grad(weighed(expected), [expected, *whole], retain_graph=True)
        gradients = torch.autograd.grad((found * shards.shard(truth[0])).sum(), mine)
        distances += [a - shards.shard(b) for a, b in zip(gradients, truth[1:], strict=True)]
    return max(float(distance.detach().abs().max()) for distance in distances)


def _attention(case: Case, mesh: DeviceMesh) -> AttentionBackend:
    shards = SequenceShards(mesh.get_local_rank(), case.size, case.balanced)
    if case.backend == "ring":
        return RingAttention(shards, mesh, case.window, case.chunked)
    inner = attention_backend(case.backend, case.window, case.chunked)
    return ContextParallelAttention(inner, shards, mesh)


def _costs(case: Case, mesh: DeviceMesh) -> tuple[dict[str, int], int]:
    """Count what one attention sends in forward and backward, and the numbers that it keeps between them."""
    attention, documents = _attention(case, mesh), None if case.packing is None else PACKINGS[case.packing]
    shards = SequenceShards(mesh.get_local_rank(), case.size, case.balanced)
    mine = [shards.shard(x).requires_grad_() for x in inputs(8, case.kv_heads)]
    mask = attention.mask(documents, ROWS, LENGTH // case.size, torch.device("cpu"))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.itemsize
        return x

    with Collectives() as counted:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = attention(*mine, mask)
        out.sum().backward()
    sent = {name: n for name, n in counted.counts.items() if "wait" not in name}
    return sent, sum(kept.values())


TRAINED: dict[str, dict[str, Any]] = {
    "tp, recomputed": {
        "documents": True,
        "parallelism": {"tensor_parallel_degree": 2},
        "activation_checkpoint": {"mode": "selective"},
    },
    "pp": {
        "documents": False,
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2},
    },
}


def _trained(folder: str, name: str, method: str) -> list[tuple[float, float]]:
    """Losses and norms of a run of the trainer whose keys and values reach the other ranks by ``method``."""
    tables = dict(TRAINED[name])
    documents = tables.pop("documents")
    how = {"context_parallel_degree": 2, "context_parallel_rotate_method": method}
    precision = dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), "float64")
    trainer = small_trainer(
        small_config(
            Path(folder, f"{name} {method}"),
            model={"vocab_size": 4104, "dim": 32, "n_layers": 2, "ffn_dim": 48},
            training={"steps": 2, "seq_len": 32, "local_batch_size": 4, **precision},
            data={"document_mask": documents},
            **tables | {"parallelism": tables["parallelism"] | how},
        )
    )
    trainer.train()
    return [(record["loss"], record["grad_norm"]) for record in trainer.history]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def _world(folder: str) -> dict[str, Any]:
    give_varlen_a_cpu_kernel()
    device = torch.device("cpu")
    meshes = {2: build_mesh(device, dp_shard=2, cp=2).cp, 4: build_mesh(device, cp=4).cp}
    return {
        "distances": {case: _beside_whole(case, meshes[case.size]) for case in CASES},  # type: ignore[arg-type]
        "trained": {
            name: [_trained(folder, name, method) for method in ("alltoall", "allgather")] for name in TRAINED
        },
        "costs": {case: _costs(case, meshes[case.size]) for case in COUNTED},  # type: ignore[arg-type]
    }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_world, 4, str(tmp_path_factory.mktemp("context")), timeout=170)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_to_split_sequences_is_that_to_whole_ones(world: list[dict[str, Any]], case: Case) -> None:
    # Numbers of up to some tens in fp64 in another order; one token too many in a softmax over at most 200
    # would be 1e-3. The flash kernel of the CPU was given fp32.
    bound = 1e-4 if case.backend == "flash" else 1e-12
    assert max(found["distances"][case] for found in world) < bound


@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_keys_and_values_are_gathered_once_or_travel(world: list[dict[str, Any]], case: Case) -> None:
    for found in world:
        sent, kept = found["costs"][case]
        own = ROWS * LENGTH // case.size
        queries, keys = 8 * own * 16, case.kv_heads * own * 16
        if case.backend == "ring":
            # To each other rank there and in backward again, then with their gradients home.
            assert sent == {"all_to_all_single": 3 * case.size - 2}
            assert kept == 2 * queries + 2 * keys + 8 * own  # the result as well, and a log-sum-exp a head
        else:
            assert sent == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
            # Those of all, once for both of a rank's pieces.
            assert kept >= queries + 2 * keys * case.size


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_with_a_ring_is_the_run_that_gathers(world: list[dict[str, Any]], name: str) -> None:
    for found in world:
        ring, gathered = found["trained"][name]
        assert len(ring) == 2
        for step in zip(ring, gathered, strict=True):
            assert step[0] == pytest.approx(step[1], rel=1e-11)  # fp64 in another order, through an update


def test_a_ring_on_cuda_has_no_documents_and_no_window() -> None:
    ring = RingAttention.__new__(RingAttention)
    ring.shards, ring.window, ring.chunked = SequenceShards(0, 2), 2 * LENGTH - 1, False
    with pytest.raises(ValueError, match="supports no mask: documents"):
        ring.mask(PACKED, ROWS, LENGTH, torch.device("cuda"))
    with pytest.raises(ValueError, match="supports no mask: tokens"):
        ring.mask(None, ROWS, LENGTH, torch.device("cuda"))
    ring.window = 2 * LENGTH
    assert ring.mask(None, ROWS, LENGTH, torch.device("cuda")) is None
    ring.chunked = True
    assert ring.mask(None, ROWS, LENGTH, torch.device("cuda")) is None
