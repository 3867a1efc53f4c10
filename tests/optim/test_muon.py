"""Muon is torch's on one process, the same on any mesh, and no matrix is worked on twice."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests import mesh_runs, meshes
from tests.helpers import in_layout, run_world
from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.preflight.bad_runs import CPU
from tests.training import MESHES, small_config, small_trainer
from toolkit.compat import shape_and_offset_at
from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.optim import muon
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.preflight import notes
from toolkit.trainer import Trainer

BLOCK = "layers.0.attention"
SHAPES = {
    "tok_embeddings.weight": (48, 24),
    f"{BLOCK}.wq.weight": (24, 24),
    f"{BLOCK}.wq.lora_a": (3, 24),
    "layers.0.feed_forward.w1.weight": (40, 24),
    "layers.0.feed_forward.w2.weight": (24, 40),
    "layers.0.ffn_norm.weight": (24,),
    "layers.1.moe.router.gate.weight": (8, 24),
    "layers.1.moe.experts.w1": (2, 8, 24),
    "layers.1.moe.experts.w1_bias": (2, 8),
    "layers.1.moe.experts.w1_lora_a": (2, 3, 24),
    "output.weight": (48, 24),
}
EXPERTS = "layers.1.moe.experts.w1"
MATRICES = [
    name
    for name in SHAPES
    if "wq.weight" in name or "feed_forward" in name or name.endswith(("gate.weight", "experts.w1"))
]
NUMBERS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def _parameters(dtype: torch.dtype, device: str = "cpu") -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape).mul(0.02).to(device, dtype)) for name, shape in SHAPES.items()
    }


def _build(named: dict[str, nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    table = Optimizer(**NUMBERS | {"name": "Muon", "implementation": "for-loop"} | options)
    return build_optimizer(named.items(), Config(optimizer=table))


def _draw_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


# Without nesterov torch 2.13 divides the momentum that it keeps, if that has 16 bits.
@pytest.mark.parametrize(
    ("dtype", "nesterov", "adjust_lr_fn"),
    [
        (torch.float32, True, "match_rms_adamw"),
        (torch.float32, False, "original"),
        (torch.bfloat16, True, "match_rms_adamw"),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_steps_are_those_of_torchs_muon_and_adamw(
    device: str, dtype: torch.dtype, nesterov: bool, adjust_lr_fn: str
) -> None:
    options = {"momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "adjust_lr_fn": adjust_lr_fn}
    ours, theirs = (
        {name: nn.Parameter(it.to(device)) for name, it in _parameters(dtype).items()} for _ in "12"
    )
    optimizer = _build(ours, muon=options, no_decay=["*w2.weight", "*norm.weight"])
    # torch's Muon takes one matrix: each expert is a parameter that shares the memory of the stack.
    experts = [nn.Parameter(it) for it in theirs[EXPERTS].detach()]
    spared = [name for name in theirs if "w2" in name or "norm" in name]
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in theirs.items():
        its = experts if name == EXPERTS else [parameter]
        groups.setdefault((name in MATRICES, name in spared), []).extend(its)
    reference = [
        torch.optim.Muon(its, lr=1e-2, weight_decay=0.0 if spares else 0.1, **options)  # type: ignore[arg-type]
        if is_matrix
        else torch.optim.AdamW(
            its, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0 if spares else 0.1, foreach=False
        )
        for (is_matrix, spares), its in groups.items()
    ]
    for step in range(4):
        for named, optimizers in ((ours, [optimizer]), (theirs, reference)):
            _draw_gradients(named, step)
            gradients = named[EXPERTS].grad
            assert gradients is not None
            for index, expert in enumerate(experts):
                expert.grad = gradients[index]
            for each in optimizers:
                each.step()
                for group in each.param_groups:  # as a schedule does
                    group["lr"] *= 0.9
    for name, parameter in ours.items():
        if dtype == torch.float32 and device == "cpu" and name != EXPERTS:
            assert torch.equal(parameter, theirs[name]), name
        else:  # torch adds a transposed update by another kernel, and several matrices are a batched one
            torch.testing.assert_close(parameter, theirs[name], rtol=2**-7, atol=2e-4)


@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8)], ids=str)
def test_a_stack_is_iterated_on_as_a_loop_over_its_matrices(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    # A batched matmul may add in another order.
    one_by_one = torch.stack([muon.orthogonalize(it, 5) for it in x])
    torch.testing.assert_close(muon.orthogonalize(x, 5), one_by_one, rtol=1e-12, atol=1e-13)


def test_a_matrix_in_fp64_is_iterated_on_in_fp64() -> None:
    """The iterations are a polynomial of the singular values."""
    torch.manual_seed(0)
    for shape in ((20, 20), (12, 30), (30, 12)):
        x = torch.randn(shape, dtype=torch.float64)
        left, values, right = torch.linalg.svd(x, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(muon.orthogonalize(x, 5), left * values @ right, rtol=1e-11, atol=1e-11)
        # Not torch's 16 bits.
        named = {f"{BLOCK}.wq.weight": nn.Parameter(torch.zeros(shape, dtype=torch.float64))}
        optimizer = _build(named, lr=1.0, muon={"momentum": 0.0})
        for parameter in named.values():
            parameter.grad = x
        optimizer.step()
        expected = -0.2 * max(shape) ** 0.5 * (left * values @ right)
        torch.testing.assert_close(*(it.detach() for it in named.values()), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(256, 256), (64, 512), (512, 64)], ids=str)
def test_an_update_is_as_large_as_adamws_so_that_one_rate_serves_both(shape: tuple[int, int]) -> None:
    named = {f"{BLOCK}.wq.weight": nn.Parameter(torch.zeros(shape))}
    optimizer = _build(named, lr=1.0)
    _draw_gradients(named, 0)
    optimizer.step()
    [parameter] = named.values()
    assert 0.15 < parameter.detach().square().mean().sqrt() < 0.25


def test_matrices_of_blocks_have_momentum_and_all_else_adamws_moments() -> None:
    named = _parameters(torch.float32)
    named[f"{BLOCK}.wo.weight"] = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    states: dict[str, set[str]] = {}
    for name in optimizer_tensors(named.items(), _build(named)):
        parameter, _, key = name.removeprefix("optim.").rpartition(".")
        states.setdefault(parameter, set()).add(key)
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    assert states == {name: {"momentum_buffer"} if name in MATRICES else adamw for name in SHAPES}


def test_what_is_all_matrices_or_has_none_is_updated() -> None:
    for names in (MATRICES, ["output.weight"]):
        named = {name: it for name, it in _parameters(torch.float32).items() if name in names}
        before = [it.detach().clone() for it in named.values()]
        optimizer = _build(named)
        _draw_gradients(named, 0)
        optimizer.step()
        assert not any(map(torch.equal, before, named.values()))


EXPERTS_AND_MUON: dict[str, Any] = {
    "model": {"name": "experts", "flavor": "debugmodel"},
    "optimizer": {"name": "Muon"},
    "finetune": {"freeze_first_layers": 1},
}


def test_the_preflight_counts_what_each_updates(tmp_path: Path) -> None:
    config = small_config(tmp_path, **EXPERTS_AND_MUON)
    groups = run_world(_sizes, 1, str(tmp_path))[0]
    matrices, rest = (
        [size for is_matrix, sizes in groups for size in sizes if is_matrix == wanted]
        for wanted in (True, False)
    )
    told = f"Muon updates {sum(matrices):,} parameters in {len(matrices)} matrices, AdamW {sum(rest):,}"
    assert len(matrices) == 4 + 3 + 1 + 3 * 8  # of attention, shared experts, the router and 8 experts
    assert f"optimizer.name: {told}" in notes(config, world_size=1, hardware=CPU)


def _sizes(folder: str) -> list[tuple[bool, list[int]]]:
    config = small_config(folder, **EXPERTS_AND_MUON)
    groups = small_trainer(config).optimizer.param_groups
    return [
        ("momentum" in group, [size for it in group["params"] for size in _sizes_of_matrices(it)])
        for group in groups
    ]


def _sizes_of_matrices(parameter: nn.Parameter) -> list[int]:
    experts = len(parameter) if parameter.ndim == 3 else 1
    return [parameter.numel() // experts] * experts


# On meshes

STEPS = 20
LAYERS = 2
LAYOUTS = {
    2: ["shard2 muon", "replicate2 muon", "tp2 muon", "pp2 1F1B muon"],
    4: ["shard4 muon", "replicate2 shard2 muon", "shard2 tp2 muon", "pp2 shard2 1F1B muon"],
    8: ["shard8 muon", "pp2 replicate2 tp2 1F1B muon"],
}


@contextlib.contextmanager
def _longer() -> Iterator[None]:
    """Runs of ``STEPS`` steps, and fewer layers than others have."""
    with (
        patch.object(mesh_runs, "STEPS", STEPS),
        patch.dict(meshes.PLAIN, {"model.n_layers": LAYERS, "training.seq_len": 16}),
    ):
        yield


def _record(folder: str) -> None:
    with _longer():
        mesh_runs.record(folder, ["one muon"])


def _compare(folder: str, layouts: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    worked: list[int] = []
    iterate = muon.orthogonalize

    def counted(x: Tensor, steps: int) -> Tensor:
        worked.append(muon._cost(x.shape))
        return iterate(x, steps)

    with patch.object(muon, "orthogonalize", counted), _longer():
        for layout in layouts:
            worked.clear()
            with in_layout(layout):
                results[layout] = mesh_runs.compare(folder, layout) | {"worked": [*worked]}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("muon"))
    run_world(_record, 1, folder)
    return folder


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (4, 8))]
)
def test_any_mesh_has_the_weights_of_one_process_and_shares_the_work(folder: str, ranks: int) -> None:
    everywhere = run_world(_compare, ranks, folder, LAYOUTS[ranks])
    for layout, result in everywhere[0].items():
        assert max(result["parameters"].values()) < 1e-9, layout
        assert max(result["losses"]) < 1e-9, layout
        costs = [rank[layout]["worked"] for rank in everywhere]
        assert sum(map(len, costs)) == 7 * LAYERS * STEPS, layout
        works = [sum(rank) / STEPS for rank in costs]
        assert max(works) - min(works) <= max(map(max, costs)), layout


def _owned(folder: str, layouts: list[str]) -> dict[str, tuple[int, int]]:
    """Experts' matrices that this rank owns, and how many of them it stores whole."""
    found = {}
    for layout in layouts:
        optimizer = small_trainer(mesh_runs.configure(folder, layout)).optimizer
        mine = [it for bucket in optimizer._buckets for it in bucket if it.owner == dist.get_rank()]
        stacks = [it for it in mine if len(it.shape) == 3]
        whole = [it for it in stacks if it.shards[it.owner] == tuple(slice(0, size) for size in it.shape)]
        found[layout] = sum(it.shape[0] for it in stacks), sum(it.shape[0] for it in whole)
    return found


def test_ranks_own_the_experts_that_they_store_and_share_those_of_split_width(tmp_path: Path) -> None:
    experts = 3 * 3 * 8 // 4  # of three layers, per rank
    layouts = {
        "shard4 moe muon": (experts, experts),
        "shard2 tp2 ep2 moe muon": (experts, experts),
        "replicate2 shard2 ep2 moe muon": (experts, experts),
        "shard2 tp2 moe muon": (experts, 0),
    }
    assert run_world(_owned, 4, str(tmp_path), list(layouts)) == [layouts] * 4


@pytest.mark.parametrize("largest", [48, 1 << 20])
@pytest.mark.parametrize(
    ("mesh", "placements", "experts"),
    [
        ((1,), [Replicate()], 5),
        ((4,), [Shard(0)], 6),
        ((4,), [Shard(0)], 3),
        ((4,), [Shard(1)], 2),
        ((2, 2), [Replicate(), Shard(0)], 5),
        ((2, 2), [Shard(1), Shard(0)], 6),
        ((2, 2), [Shard(0), Shard(2)], 3),
    ],
    ids=str,
)
def test_chunks_of_a_stack_have_every_element_once(
    mesh: tuple[int, ...], placements: list[Placement], experts: int, largest: int
) -> None:
    """In each replica; beginnings of chunks need not be those of shards."""
    shape = torch.Size((experts, 4, 6))
    for rank, coordinate in enumerate(product(*map(range, mesh))):
        size = shape_and_offset_at(shape, mesh, list(coordinate), placements)[0]
        stored, times, first = torch.zeros(size), torch.zeros(shape), 0
        for chunk, mine, shards in muon._chunks(shape, mesh, tuple(placements), rank, largest):
            stored[mine] += 1
            assert stored[mine].shape == tuple(it.stop - it.start for it in shards[rank])
            for slices in shards:
                times[first : first + chunk[0]][slices] += 1
            first += chunk[0]
        assert stored.eq(1).all() and first == experts
        assert times.eq(mesh[0] if placements[0].is_replicate() else 1).all()


def _in_buckets(folder: str) -> tuple[list[int], bool]:
    weights, collectives = [], []
    send = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        collectives[-1] += 1
        return send(*args, **kwargs)

    for size in (muon.BUCKET, 1500):
        collectives.append(0)
        with (
            patch.object(mesh_runs, "STEPS", 3),
            patch.object(muon, "BUCKET", size),
            patch.object(dist, "all_to_all_single", counted),
        ):
            weights.append(mesh_runs.run(folder, "replicate2 shard2 muon")["final"])
    same = all(torch.equal(a, b) for (_, a), (_, b) in zip(*weights, strict=True))
    return collectives, same


def test_many_buckets_give_the_bits_of_one_which_takes_two_collectives(folder: str) -> None:
    for collectives, same in run_world(_in_buckets, 4, folder):
        assert same and collectives[0] == 2 * 3 and collectives[1] > collectives[0]


# From checkpoints

SAVED, LAST = 2, 6


def _trainer(folder: Path, mesh: str, *, steps: int = LAST, **checkpoint: Any) -> Trainer:
    exact = {key: "float64" for key in ("dtype", "mixed_precision_param", "mixed_precision_reduce")}
    config = small_config(
        folder,
        training={"steps": steps, "local_batch_size": 4, **exact},
        optimizer={"name": "Muon"},
        lr_scheduler={"total_steps": LAST},
        checkpoint={"enable": True, "interval": SAVED, **checkpoint},
        parallelism=MESHES[mesh],
    )
    return small_trainer(config)


def _losses(trainer: Trainer) -> dict[int, float]:
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return {record["step"]: record["loss"] for record in trainer.history}


def _save_and_go_on(folder: str) -> tuple[dict[int, float], ...]:
    begins = {
        "initial_load_path": f"{folder}/whole/checkpoint/step-{SAVED}",
        "initial_load_model_only": False,
    }
    whole = _losses(_trainer(Path(folder, "whole"), "fsdp"))
    return whole, *(_losses(_trainer(Path(folder, mesh), mesh, **begins)) for mesh in MESHES)


def _go_on(folder: str, source: str, name: str, mesh: str, steps: int) -> dict[int, float]:
    begins = {"initial_load_path": f"{folder}/{source}", "initial_load_model_only": False}
    return _losses(_trainer(Path(folder, name), mesh, steps=steps, **begins))


def test_a_checkpoint_goes_on_to_the_bit_and_from_two_ranks_to_four_to_one(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for whole, same, *others in run_world(_save_and_go_on, 2, folder):
        rest = {step: loss for step, loss in whole.items() if step > SAVED}
        assert same == rest and len(rest) == LAST - SAVED
        assert others == [pytest.approx(rest, rel=1e-12)] * 2
    step = f"checkpoint/step-{SAVED}"
    [four, *_] = run_world(_go_on, 4, folder, f"whole/{step}", "four", "tp", 4)
    [one] = run_world(_go_on, 1, folder, "four/checkpoint/step-4", "one", "fsdp", LAST)
    assert four | one == pytest.approx(rest, rel=1e-12)
