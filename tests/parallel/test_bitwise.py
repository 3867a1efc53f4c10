"""``debug.bitwise_data_parallel``: the same bits at any number of data-parallel ranks, by the fingerprints of
gradients, weights and optimizer state at every step, and what compare-runs says of runs that differ."""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.helpers import run_world
from tests.training import MESHES, small_config, small_trainer
from toolkit.cli import run_command
from toolkit.commands import compare_runs
from toolkit.distributed.dtensor import local
from toolkit.metrics.fingerprint import fingerprints
from toolkit.metrics.jsonl import FINGERPRINTS
from toolkit.parallel.bitwise import PairwiseSum, _exact_row_squares, row_squares

ROOT = Path(__file__).parents[2]
STEPS = 20
Layout = tuple[int, dict[str, Any]]
ONE: Layout = (1, {})
REPLICAS, TP = "data_parallel_replicate_degree", "tensor_parallel_degree"
# On 4 ranks; hybrid ones on 2 × 2.
STRATEGIES: dict[str, Layout] = {
    name: (4, {"sharding_strategy": name, **({REPLICAS: 2} if "HYBRID" in name else {})})
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
}
DATA_PARALLEL: dict[str, Layout] = {
    **{f"dp {ranks}": (ranks, {}) for ranks in (2, 3, 6, 8)},
    "2 × 4": (8, {REPLICAS: 2}),
    "3 × 2": (6, {REPLICAS: 3}),
    **STRATEGIES,
}
DEBUG_MODEL = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 768}
PIPELINES: dict[str, dict[str, Any]] = {
    schedule: MESHES["pp"] | {"pipeline_parallel_microbatch_size": 1, "pipeline_parallel_schedule": schedule}
    for schedule in ("1F1B", "GPipe", "Interleaved1F1B")
}
BF16 = {"training": {"mixed_precision_param": "bfloat16"}}
SMALLER_BATCH = {"training": BF16["training"] | {"global_batch_size": 12}}
LORA = {
    "finetune": {"adapter": "lora", "lora": {"rank": 4, "dropout": 0.1, "target_modules": ["all-linear"]}}
}
# Rows of 256 elements, which AdamW8bit quantizes.
WIDE = {"model": {"dim": 256, "ffn_dim": 256, "n_layers": 1}}
EXPERTS = {"model": {"name": "deepseek_v3", "n_kv_heads": 8}, "moe": {"aux_loss_coeff": 0.01}}
GROUPS = {
    "optimizer": {
        "groups": {"head": {"params": ["output.*"], "lr": 1e-4}},
        "layer_lr_decay": 0.8,
        "ema_decay": 0.9,
    },
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "checkpointing": {"activation_checkpoint": {"mode": "full"}},
    "compiled": {"compile": {"enable": True}},
    "lora": LORA,
    "muon": {"optimizer": {"name": "Muon"}},
    "groups, ema": GROUPS,
    "neftune": {"finetune": {"neftune_noise_alpha": 5.0}},
    "AdamW8bit": {"optimizer": {"name": "AdamW8bit"}, **WIDE},
    "for-loop": {"optimizer": {"implementation": "for-loop"}},
    "experts": EXPERTS,
    "experts, muon": EXPERTS | {"optimizer": {"name": "Muon"}},
    "offload": {"training": {"enable_cpu_offload": True}},
}


def _train(
    folder: str, layout: dict[str, Any], tables: dict[str, Any], steps: int, *, bitwise: bool = True
) -> None:
    torch._dynamo.reset()
    given = {name: dict(table) for name, table in tables.items()}
    is_long = steps > STEPS
    sizes = {"steps": steps, "global_batch_size": 24 if is_long else 12, "local_batch_size": 1}
    training = sizes | {"seq_len": 32} | given.pop("training", {})
    model = (DEBUG_MODEL if is_long else {}) | given.pop("model", {})
    optimizer = {"implementation": "foreach", "lr": 3e-3, **given.pop("optimizer", {})}
    trainer = small_trainer(
        small_config(
            folder,
            model=model,
            training=training,
            optimizer=optimizer,
            parallelism=layout | given.pop("parallelism", {}),
            validation={"enable": True, "dataset": "embedded_validation", "seq_len": 32, "freq": 10,
                        "local_batch_size": 1, "samples": 7},
            debug={"bitwise_data_parallel": bitwise},
            metrics={"fingerprint_every": 1, "enable_tensorboard": False, "log_freq": 1},
            **given,
        )
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()


def _differences(
    tmp_path: Path, layouts: Sequence[Layout], tables: dict[str, Any], capsys: Any, *, steps: int = STEPS,
    first: Layout = ONE, **options: Any,
) -> list[str]:  # fmt: skip
    """Train on each layout; return what compare-runs prints of it beside the first one."""
    said = []
    for number, (ranks, layout) in enumerate([first, *layouts]):
        run_world(
            _train_with, ranks, str(tmp_path / str(number)), layout, tables, steps, options, timeout=1500
        )
        if number:
            code = run_command("compare-runs", [str(tmp_path / "0"), str(tmp_path / str(number))])
            said.append(capsys.readouterr().out)
            assert (code == 0) == ("equal, bit for bit" in said[-1])
            assert f"compared steps 1 to {steps}, {steps} in all, fingerprints of {steps}" in said[-1]
    return said


def _train_with(
    folder: str, layout: dict[str, Any], tables: dict[str, Any], steps: int, options: dict[str, Any]
) -> None:
    _train(folder, layout, tables, steps, **options)


def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = [DATA_PARALLEL[name] for name in ("dp 2", "dp 3", "HYBRID_SHARD")]
    for said in _differences(tmp_path, layouts, BF16, capsys):
        assert "equal, bit for bit" in said


@pytest.mark.parametrize("fixed", [{TP: 2}, PIPELINES["1F1B"]], ids=["tp", "pp"])
def test_beside_a_fixed_degree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fixed: dict[str, Any]
) -> None:
    first, other = (2, fixed), (4, fixed)
    [said] = _differences(tmp_path, [other], {}, capsys, first=first)
    assert "equal, bit for bit" in said


def test_without_the_option_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [said] = _differences(tmp_path, [(2, {})], BF16, capsys, steps=2, bitwise=False)
    assert "first difference: step 1\n" in said and "gradients of " in said


@pytest.fixture(scope="module", params=[{}, BF16], ids=["fp32", "bf16"])
def debug_model_on_one_rank(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one") / "0"
    run_world(_train_with, 1, str(folder), {}, request.param, 200, {}, timeout=1500)
    return folder, request.param


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", DATA_PARALLEL)
def test_200_steps_of_the_debug_model(
    debug_model_on_one_rank: tuple[Path, dict[str, Any]],
    layout: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, tables = debug_model_on_one_rank
    ranks, degrees = DATA_PARALLEL[layout]
    run_world(_train_with, ranks, str(tmp_path / "0"), degrees, tables, 200, {}, timeout=1500)
    assert run_command("compare-runs", [str(one), str(tmp_path / "0")]) == 0
    assert "fingerprints of 200\nequal, bit for bit" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_techniques(tmp_path: Path, capsys: pytest.CaptureFixture[str], technique: str) -> None:
    tables = TECHNIQUES[technique]
    tables = tables | {"training": BF16["training"] | tables.get("training", {})}
    layouts = [DATA_PARALLEL[name] for name in ("dp 2", "dp 3", "HYBRID_SHARD")]
    for said in _differences(tmp_path, layouts, tables, capsys):
        assert "equal, bit for bit" in said


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("technique", ["checkpointing", "compiled", "lora", "muon"])
def test_200_steps_with_a_technique(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], technique: str
) -> None:
    layouts = [DATA_PARALLEL[name] for name in ("dp 3", "HYBRID_SHARD")]
    for said in _differences(tmp_path, layouts, TECHNIQUES[technique] | SMALLER_BATCH, capsys, steps=200):
        assert "equal, bit for bit" in said


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("degree", [TP, "context_parallel_degree"])
def test_200_steps_beside_a_fixed_degree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], degree: str
) -> None:
    first, *others = [(2 * ranks, {degree: 2}) for ranks in (1, 2, 4)]
    for said in _differences(tmp_path, others, SMALLER_BATCH, capsys, steps=200, first=first):
        assert "equal, bit for bit" in said


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", PIPELINES)
def test_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: str) -> None:
    tables = LORA | {"training": BF16["training"] | {"local_batch_size": 2}, "model": {"n_layers": 4}}
    first, *others = [(2 * ranks, PIPELINES[schedule]) for ranks in (1, 2, 3)]
    for said in _differences(tmp_path, others, tables, capsys, first=first):
        assert "equal, bit for bit" in said


# Runs that move between sizes


def _moved(folder: str, stop: int, tables: dict[str, Any]) -> None:
    _train(folder, {}, tables, stop)


def test_a_run_that_moves_between_sizes_keeps_its_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = (
        BF16
        | GROUPS
        | {
            "checkpoint": {"enable": True, "interval": 3, "keep_latest_k": 2},
            "lr_scheduler": {"warmup_steps": 2, "decay_type": "constant"},
        }
    )
    run_world(_moved, 1, str(tmp_path / "alone"), 12, tables, timeout=200)
    for ranks, stop in ((4, 3), (3, 6), (2, 9), (1, 12)):
        run_world(_moved, ranks, str(tmp_path / "moved"), stop, tables, timeout=200)
    code = run_command("compare-runs", [str(tmp_path / "alone"), str(tmp_path / "moved")])
    said = capsys.readouterr().out
    assert code == 0 and "fingerprints of 12" in said, said


def _start(folder: Path, ranks: int) -> subprocess.Popen[str]:
    flags = [
        f"--job.dump_folder={folder}", f"--data.cache_folder={folder.parent / 'cache'}",
        "--training.steps=24", "--training.seq_len=32", "--training.global_batch_size=24",
        "--training.local_batch_size=1", "--training.mixed_precision_param=bfloat16",
        "--checkpoint.interval=2", "--validation.freq=12", "--validation.samples=7",
        "--debug.bitwise_data_parallel=true", "--optimizer.implementation=foreach",
        "--metrics.fingerprint_every=1", "--metrics.log_freq=1",
    ]  # fmt: skip
    environment = os.environ | {"NGPU": str(ranks)}
    return subprocess.Popen(
        ["./run_train.sh", *flags], cwd=ROOT, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def _reached(folder: Path) -> int:
    """The last step that a run has logged."""
    return max((step for step, values in compare_runs.read_steps(folder).items() if "weights" in values))


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_and_moved_keeps_its_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    said = _start(alone, 1).communicate(timeout=600)[0]
    assert _reached(alone) == 24, said
    for ranks, stop in ((8, 5), (3, 11), (6, 17)):
        run = _start(moved, ranks)
        while not (moved / FINGERPRINTS).exists() or _reached(moved) < stop:
            assert run.poll() is None, run.communicate()[0]
            time.sleep(0.1)
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate(timeout=60)
        assert stop <= _reached(moved) < 24
    said = _start(moved, 1).communicate(timeout=600)[0]
    assert "resum" in said
    code = run_command("compare-runs", [str(alone), str(moved)])
    said = capsys.readouterr().out
    assert code == 0 and "compared steps 1 to 24, 24 in all, fingerprints of 24" in said, said


# A fault, and what is said of it

FAULTY = "layers.1.attention.wq.weight"


def _with_a_fault(folder: str, step: int, steps: int) -> None:
    """Flip the lowest bit of one element of one gradient on one rank."""
    config = small_config(
        folder,
        training={"steps": steps, "global_batch_size": 8, "local_batch_size": 2},
        optimizer={"implementation": "foreach"},
        debug={"bitwise_data_parallel": True},
        metrics={"fingerprint_every": 1, "enable_tensorboard": False, "log_freq": 1},
    )
    trainer = small_trainer(config)
    parts, backward = trainer.model_parts, trainer.model_parts.backward

    def faulty(*args: Any) -> Tensor:
        rows = backward(*args)
        if trainer.train_state.step == step and dist.get_rank() == 1:
            local(dict(parts.named_parameters())[FAULTY].grad).view(torch.int32)[2, 3] ^= 1
        return rows

    parts.backward = faulty  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()


def test_one_bit_of_one_gradient_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_world(_with_a_fault, 1, str(tmp_path / "sound"), 0, 60, timeout=200)
    run_world(_with_a_fault, 2, str(tmp_path / "faulty"), 57, 60, timeout=200)
    assert run_command("compare-runs", [str(tmp_path / "sound"), str(tmp_path / "faulty")]) == 1
    said = capsys.readouterr().out
    first, gradients = said.splitlines()[1:3]
    assert first == "first difference: step 57"
    assert gradients.startswith("  gradients of 1 of ") and gradients.endswith(f": {FAULTY}")


# Sums


def _tree(leaves: Sequence[Tensor]) -> Tensor:
    """The sum of the largest power of two of leaves, halved again and again, and that of the rest."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return _tree(leaves[:half]) + _tree(leaves[half:])


@pytest.mark.parametrize("count", [1, 2, 3, 8, 24, 31])
def test_leaves_are_added_along_one_tree(count: int) -> None:
    leaves = list(torch.randn(count, 50))
    sums = PairwiseSum()
    for number, leaf in enumerate(leaves, 1):
        reused = leaf.clone()
        sums.add(reused)
        reused.zero_()
        assert len(sums._partial) == number.bit_count()
    assert torch.equal(sums.take(), _tree(leaves)) and not sums._partial


def test_a_sum_has_no_negative_zero() -> None:
    sums = PairwiseSum()
    sums.add(torch.tensor([-0.0]))
    assert math.copysign(1, sums.take().item()) == 1


def test_squares_of_a_row_do_not_depend_on_other_rows_or_the_order() -> None:
    rows = torch.randn(40, 1000) * torch.logspace(-20, 15, 40)[:, None]
    rows[3] = 0
    exact = rows.double().square().sum(1)
    for compute, error in ((row_squares, 1e-14), (_exact_row_squares, 1e-10)):
        found = compute(rows)
        torch.testing.assert_close(found, exact, rtol=error, atol=0)
        for start, end in ((0, 1), (3, 4), (5, 22)):
            assert torch.equal(compute(rows[start:end]), found[start:end])
    shuffled = rows[:, torch.randperm(1000)]
    assert torch.equal(_exact_row_squares(shuffled), _exact_row_squares(rows))


def _fingerprints() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    whole = {
        str(dtype): torch.randn(7, 6, 5).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    found = {}
    for name, tensor in whole.items():
        for placement in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(2), Replicate())):
            found[f"{name} {placement}"] = distribute_tensor(tensor, mesh, placement)
    return fingerprints([*found.items(), *whole.items(), ("scalar", torch.tensor(3.0))])


def test_fingerprints_do_not_depend_on_sharding_and_see_every_bit() -> None:
    ranks = run_world(_fingerprints, 4, timeout=60)
    assert all(rank == ranks[0] for rank in ranks)
    for name, value in ranks[0].items():
        assert value == ranks[0][name.split(" ")[0]]
    assert len(set(ranks[0].values())) == 4
