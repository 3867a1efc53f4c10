"""The forecast of a step's time: pieces that add up, schedules with their known bubbles, links by hand."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.layouts import LAYOUTS, Layout, forecast
from tests.training import small_config
from toolkit.config import Config
from toolkit.errors import ConfigError
from toolkit.metrics.flops import flops_per_token, peak_flops
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import model_args
from toolkit.models.parameters import table
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.parallel.pipeline_schedules import SCHEDULES, bubble
from toolkit.planner.costs import costs
from toolkit.planner.fake_step import fake_run
from toolkit.planner.machines import Machine, find_machine, machine_from_device, machines
from toolkit.planner.pipeline import simulate
from toolkit.planner.rates import Pass, Rates
from toolkit.planner.time import step_time
from toolkit.planner.units import UnitTime, accumulation, exposed_gathers, exposed_in_backward
from toolkit.planner.work import Costs, ModuleCost, Operation, Work

ROOT = Path(__file__).resolve().parents[2]
MACHINE = Machine(
    name="round", memory=1e9, peak={"float32": 1e9, "bfloat16": 4e9}, matmul=0.5, attention=0.25,
    bandwidth=1e9, node=8, link=100.0, network=10.0, link_latency=0.0, network_latency=0.0, launch=0.0,
)  # fmt: skip


def planned(tmp_path: Path, **tables: dict[str, Any]) -> tuple[Config, ModelArgs]:
    config = small_config(tmp_path, **tables)
    return config, model_args(config, tokenizer_vocab=256)


def found(config: Config, args: ModelArgs, tp: int = 1, cp: int = 1, *, checkpointed: bool = True) -> Costs:
    return costs(config, args, tp=tp, cp=cp, rows=2, checkpointed=checkpointed, param_dtype=torch.bfloat16)


def products(piece: ModuleCost) -> float:
    return sum(work.flops("matmul") for work in (piece.forward, piece.backward))


# Costs


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_products_are_the_flops_of_the_metrics(tmp_path: Path, ranks: tuple[int, int]) -> None:
    config, args = planned(tmp_path, training={"seq_len": 64, "loss_chunk_tokens": 0})
    tp, cp = ranks
    pieces = found(config, args, tp, cp, checkpointed=False)
    length, tokens = config.training.seq_len, 2 * config.training.seq_len
    blocks = products(pieces.first) + (args.n_layers - 1) * products(pieces.block)
    linear = (blocks + products(pieces.head)) * tp * cp
    norms = 6 * args.dim + 12 * args.dim * args.n_layers  # of the count, which has no products for them
    square = 12 * args.n_layers * args.n_heads * args.head_dim * length
    assert linear == tokens * (flops_per_token(args, seq_len=length) - square - norms)
    # Attention: what is seen, of which the backward computes the scores again.
    attended = pieces.block.forward.flops("attention") * tp * cp
    assert attended * 2 * args.n_layers * 3 == pytest.approx(tokens * square, rel=0.02)
    assert pieces.block.backward.flops("attention") == 2.5 * pieces.block.forward.flops("attention")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2"])
def test_matmuls_of_experts_are_the_flops_of_the_chosen_ones(tmp_path: Path, name: str, tp: int) -> None:
    heads = {"n_kv_heads": 4} if name == "deepseek_v2" else {}
    model = {"name": name, "flavor": "debugmodel", "dim": 256, "ffn_dim": None, "n_heads": 4, **heads}
    config, args = planned(tmp_path, model=model, training={"seq_len": 64, "loss_chunk_tokens": 0})
    pieces = found(config, args, tp, checkpointed=False)
    blocks = products(pieces.first) + (args.n_layers - 1) * products(pieces.block)
    square = 6 * args.n_layers * args.n_heads * (args.head_dim + args.v_head_dim) * 64
    expected = 2 * 64 * (flops_per_token(args, seq_len=64) - square)
    # Every rank of tp makes the latent vectors.
    latent = [row.size for row in table(args).values() if row.linear and row.tensor_parallel == "whole"]
    expected += (tp - 1) * 6 * sum(latent) * 2 * 64
    # Backward has as many as two forwards, in each block.
    for block in (pieces.first, pieces.block):
        assert block.backward.flops("matmul") == pytest.approx(2 * block.forward.flops("matmul"), rel=0.02)
    # Norms are counted there, and the sum of a token's outputs is a matmul here.
    assert (blocks + products(pieces.head)) * tp == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_pieces_add_up_to_a_deeper_model(tmp_path: Path, mode: str) -> None:
    tables = {"activation_checkpoint": {"mode": mode}, "model": {"n_layers": 4}, "training": {"seq_len": 64}}
    config, args = planned(tmp_path, **tables)
    pieces = found(config, args)
    parts = [pieces.embedding, pieces.first, *[pieces.block] * 3, pieces.head]
    ours = sum(
        work.flops("matmul") for piece in parts for work in (piece.forward, piece.backward, piece.recompute)
    )
    training = config.training.model_copy(update={"local_batch_size": 2, "global_batch_size": 2})
    deep = config.model_copy(update={"training": training})
    with fake_run(deep, args, ParallelDims(1, 1, 1, 1, 1), 0, param_dtype=torch.bfloat16) as run:
        with FlopCounterMode(display=False) as counter:
            run.passes()
        counted = counter.get_flop_counts()["Global"]
        numbers = sum(it.numel() for model in run.model_parts.models for it in model.parameters())
    assert ours == sum(counted.values())
    assert sum(piece.elements for piece in parts) == numbers


def test_tensor_parallelism_sends_what_the_formula_says(tmp_path: Path) -> None:
    for again in (False, True):
        parallelism = {"tensor_parallel_recompute_allgather": again, "tensor_parallel_degree": 2}
        config, args = planned(tmp_path, training={"seq_len": 64}, parallelism=parallelism)
        block = found(config, args, tp=2, checkpointed=False).block
        hidden = 2 * 64 * args.dim * 2
        for work, gathers in ((block.forward, 2), (block.backward, 4 if again else 2)):
            sent = {it.operation: it.count * it.bytes for it in work.collectives if it.bytes == hidden}
            assert sent == {"all_gather": gathers * hidden, "reduce_scatter": 2 * hidden}
            assert all(it.waits and it.dimension == "tp" for it in work.collectives)


def test_experts_of_ep_are_sent_rows_and_shard_weights(tmp_path: Path) -> None:
    model = {"name": "qwen3_moe", "flavor": "debugmodel", "dim": 64, "n_heads": 4, "ffn_dim": None}
    config, args = planned(tmp_path, model=model, training={"seq_len": 64})
    assert args.moe
    whole, block = (
        costs(config, args, tp=1, cp=1, ep=ep, rows=2, checkpointed=False, param_dtype=torch.bfloat16).block
        for ep in (1, 4)
    )
    assert whole.experts.elements == 0 and whole.others.elements == whole.elements
    assert block.experts.elements == 3 * args.moe.ffn_dim * args.dim * args.moe.num_experts // 4
    assert whole.elements - block.elements == 3 * block.experts.elements
    rows = 2 * 64 * args.moe.top_k * args.dim * 2
    for work in (block.forward, block.backward):
        sent = [(it.operation, it.bytes, it.count) for it in work.collectives if it.dimension == "ep"]
        assert [it for it in sent if it[1] > 1000] == [("all_to_all", rows, 2)]
    assert products(block) == pytest.approx(products(whole), rel=0.01)


def test_checkpointing_keeps_the_inputs_of_blocks(tmp_path: Path) -> None:
    config, args = planned(tmp_path, training={"seq_len": 64}, activation_checkpoint={"mode": "full"})
    kept, again = found(config, args, checkpointed=False).block, found(config, args).block
    assert again.saved_bytes == 2 * 64 * args.dim * 2
    assert kept.saved_bytes > 5 * again.saved_bytes
    assert again.recompute.flops() == again.forward.flops() and not kept.recompute.operations


def test_a_reference_keeps_nothing_and_the_model_beside_it_as_much_as_alone(tmp_path: Path) -> None:
    saved = []
    for objective in ("sft", "dpo"):
        finetune = {"adapter": "lora", "objective": objective}
        block = found(*planned(tmp_path, training={"seq_len": 64}, finetune=finetune)).block
        saved.append(block.saved_bytes)
    # The documents of pairs have a mask.
    assert saved[1] == pytest.approx(saved[0], rel=0.1) and saved[0] > 0


def test_products_of_4_bits_are_as_many(tmp_path: Path) -> None:
    flops = []
    for base in ("none", "nf4"):
        finetune = {"adapter": "lora", "lora": {"quantize_base": base}}
        model = {"ffn_dim": 192}  # of whole blocks of 64
        block = found(*planned(tmp_path, model=model, training={"seq_len": 64}, finetune=finetune)).block
        flops.append([work.flops("matmul") for work in (block.forward, block.backward)])
    assert flops[0] == flops[1]


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_without_balancing_the_last_rank_is_waited_for(tmp_path: Path, method: str) -> None:
    seen = []
    for balancer in ("headtail", None):
        parallelism = {"context_parallel_load_balancer": balancer, "context_parallel_rotate_method": method}
        parallelism["context_parallel_degree"] = 2
        config, args = planned(tmp_path, training={"seq_len": 64}, parallelism=parallelism)
        seen.append(found(config, args, cp=2).block.forward.flops("attention"))
    assert seen[1] == pytest.approx(1.5 * seen[0], rel=0.1)


# Schedules


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8), (4, 16)])
def test_bubbles_are_those_of_the_formulas(name: str, pp: int, count: int) -> None:
    stages = pp * SCHEDULES[name].stages
    found = simulate(name, pp, count, forward=[1.0] * stages, backward=[2.0] * stages)
    idle = 1 - sum(found.busy) / pp / found.seconds
    formula = bubble(name, count, stages=stages, pp=pp)
    if name == "DualPipeV":  # whose formula takes a forward and a backward that overlap for one action
        assert idle < formula
        return
    assert idle == pytest.approx(formula)
    if name in ("GPipe", "1F1B"):
        assert idle == pytest.approx((pp - 1) / (count + pp - 1))


def test_more_stages_a_rank_divide_the_bubble() -> None:
    for each in (1, 2, 4):
        name = "1F1B" if each == 1 else "Interleaved1F1B"
        found = simulate(name, 4, 8, forward=[1 / each] * 4 * each, backward=[2 / each] * 4 * each)
        assert found.seconds == pytest.approx(24 + 9 / each)


def test_a_pipeline_waits_for_what_is_gathered_and_reduced() -> None:
    plain: dict[str, Any] = {"forward": [1.0, 1.0], "backward": [2.0, 2.0]}
    assert simulate("1F1B", 2, 2, **plain).seconds == 9
    # Both ranks gather at once, beside nothing; the last unit of two is computed after it.
    assert simulate("1F1B", 2, 2, **plain, gather=[4.0, 4.0], units=[2, 2]).seconds == 9 + 3.5
    # The first rank reduces its last backward's second half when all else is done.
    assert simulate("1F1B", 2, 2, **plain, reduce=[1.0, 1.0], units=[2, 2]).seconds == 9.5
    assert simulate("1F1B", 2, 1, **plain, transfer=0.25).seconds == 6.5


# Links and overlap


@pytest.mark.parametrize(
    ("dimension", "operation", "seconds"),
    [
        ("tp", "all_gather", 400 * 3 / 4 / 100),  # within a machine
        ("tp", "all_reduce", 2 * 400 * 3 / 4 / 100),
        ("cp", "all_gather", 400 / 2 / 100),
        ("dp_shard", "all_gather", 400 * 15 / 16 / 20),  # two of a group on a machine, each with an adapter
        ("dp_replicate", "all_reduce", 2 * 400 / 2 / 10),
        ("pp", "send", 400 / 10),
        ("ep 4", "all_to_all", 400 * 3 / 4 / 100),
        ("ep 16", "all_to_all", 400 / 2 / 10),  # half of it to the other machine
        ("expert_fsdp of ep 16", "all_gather", 400 * 3 / 4 / 10),
    ],
)
def test_links(tmp_path: Path, dimension: str, operation: str, seconds: float) -> None:
    config = small_config(tmp_path)
    dimension, ep = dimension.split()[0], int(dimension.split()[-1]) if " " in dimension else 1
    mesh = ParallelDims(pp=2, dp_replicate=2, dp_shard=8, cp=2, tp=4, ep=ep)
    rates = Rates(config, mesh, MACHINE, "bfloat16")
    assert rates.send(dimension, operation, 400) == pytest.approx(seconds)


def test_hops_take_their_time(tmp_path: Path) -> None:
    machine = replace(MACHINE, link_latency=1.0, network_latency=5.0)
    rates = Rates(small_config(tmp_path), ParallelDims(1, 1, 16, 1, 1), machine, "bfloat16")
    # Two machines of 8: a ring passes 15 hops, of which one in 8 leaves the machine.
    assert rates.send("dp_shard", "all_gather", 0) == pytest.approx(15 * (5 + 7) / 8)


def test_the_longer_of_flops_and_bytes(tmp_path: Path) -> None:
    rates = Rates(small_config(tmp_path), ParallelDims(1, 1, 1, 1, 1), MACHINE, "bfloat16")
    # Half of 4 GFLOP/s, a quarter for attention, 1 GB/s.
    work = Work((
        Operation("matmul", 4e9, 1e9, 2), Operation("matmul", 1e9, 3e9, 1), Operation("attention", 1e9, 0, 1),
        Operation("other", 0, 1e9, 3),
    ), (), (5e8,))  # fmt: skip
    assert rates.run(work).compute == pytest.approx(2 * 2 + 3 + 1 + 3)
    assert rates.run(work, fused=True).compute == pytest.approx(2 * 2 + 3 + 1 + 0.5)
    slow = replace(MACHINE, launch=10.0)
    rates = Rates(small_config(tmp_path), ParallelDims(1, 1, 1, 1, 1), slow, "bfloat16")
    assert rates.run(work).compute == pytest.approx(7 * 10)  # the host, which the device is faster than


def test_gathers_hide_behind_the_unit_before() -> None:
    def unit(gather: float, reduce: float) -> Any:
        done = Pass(2.0, {})
        return UnitTime(done, done, gather, reduce, 0.0, True, 1, 1.0)

    units = [unit(1, 1), unit(3, 1), unit(1, 4)]
    assert exposed_gathers(units) == 1 + (3 - 2) + 0
    # Backward: beside the last unit the middle's gather, 3; beside that the first's, 1, and a reduction of 4;
    # beside the first a reduction of 1; then its own.
    assert exposed_in_backward(units, gathers=True, reduces=True, replicas=False) == 1 + 3 + 0 + 1
    assert exposed_in_backward(units, gathers=False, reduces=True, replicas=False) == 0 + 2 + 0 + 1


def test_gradients_of_micro_batches_are_added_up(tmp_path: Path) -> None:
    rates = Rates(small_config(tmp_path), ParallelDims(1, 1, 4, 1, 1), MACHINE, "bfloat16")
    units = [UnitTime(Pass(1.0, {}), Pass(1.0, {}), 0.0, 0.0, 0.0, True, 10**9, 10**9 / 4)]

    def seconds(count: int, *, whole: bool, gradient: int = 2) -> float:
        return accumulation(units, rates, count, whole=whole, gradient=gradient, reduced=4).compute

    assert seconds(1, whole=True) == seconds(1, whole=False) == 0
    # Read as it is computed, and read and written in fp32; the first is made fp32.
    assert seconds(3, whole=True) == 6 + 2 * 10
    assert seconds(3, whole=True, gradient=4) == 2 * 12
    assert seconds(3, whole=False) == 2 * 12 / 4  # of four ranks each has a part


# The whole


def test_parts_add_up(tmp_path: Path) -> None:
    machine = replace(MACHINE, link=1e9, network=1e8)
    tables: dict[str, Any] = {
        "parallelism": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
        "training": {"seq_len": 64, "global_batch_size": 16},
    }
    config, args = planned(tmp_path, **tables)
    mesh = degrees(config.parallelism, 8)
    assert mesh
    found = step_time(config, args, mesh, machine, param_dtype=torch.bfloat16)
    parts = found.compute + sum(found.exposed.values()) + found.bubble + found.optimizer
    assert found.seconds == pytest.approx(parts) and found.bubble > 0 and found.exposed["tp"] > 0
    assert found.timeline and found.seconds == pytest.approx(found.timeline.seconds + found.optimizer)
    tokens = 16 * 64
    assert found.tokens_per_second == pytest.approx(tokens / found.seconds)
    flops = flops_per_token(args, seq_len=64)
    assert found.mfu == pytest.approx(flops * tokens / found.seconds / (8 * 4e9))
    assert found.mfu_causal < found.mfu


def test_gradients_are_sent_in_the_precision_of_reductions(tmp_path: Path) -> None:
    waited = []
    for reduced in ("float32", "bfloat16"):
        tables = {"training": {"seq_len": 64, "mixed_precision_reduce": reduced}}
        config, args = planned(tmp_path, **tables, parallelism={"fsdp_reshard_after_forward": "never"})
        machine = replace(MACHINE, network=1.0)
        mesh = ParallelDims(1, 16, 1, 1, 1)
        found = step_time(config, args, mesh, machine, param_dtype=torch.bfloat16)
        waited.append(found.exposed["dp_replicate"])
    assert waited[1] == pytest.approx(waited[0] / 2, rel=0.01)


def test_kinds_of_gpus() -> None:
    assert find_machine("NVIDIA H100 SXM") is find_machine("h100") is machines()["h100"]
    assert find_machine("A100-80").peak["bfloat16"] == peak_flops("NVIDIA A100-SXM4-80GB")
    for kind in machines().values():
        assert 0 < kind.attention < kind.matmul < 1 and kind.network < kind.link < kind.bandwidth
    with pytest.raises(ConfigError, match="h200.*h100|kinds are"):
        find_machine("h20000")
    with pytest.raises(ConfigError, match="did you mean a100-80 or a100-40?"):
        find_machine("a100")


def test_a_gpu_is_known_by_its_drivers_name_and_its_relatives_are_not_taken_for_it() -> None:
    known = {
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA L40S": "l40s",
        "NVIDIA H100 80GB HBM3": "h100",
    }
    found = {name: machine_from_device(name) for name in known}
    assert {name: kind and kind.name for name, kind in found.items()} == known
    relatives = ("H100 NVL", "H200 NVL", "A100-SXM4-80GB MIG 1g.10gb")
    games = ("RTX 4090 Laptop GPU", "RTX 4090 D", "RTX 3090 Ti")
    assert not any(map(machine_from_device, relatives + games))


def test_memory_of_a_kind_is_no_more_than_its_driver_has() -> None:
    """nvidia-smi's MiB; a name's GB are less than GiB, and ECC takes a part."""
    mib = {"h100": 81559, "a100-80": 81920, "l40s": 46068, "l4": 23034, "a10g": 23028, "h200": 143771}
    for kind, total in mib.items():
        assert find_machine(kind).memory / 2**20 == pytest.approx(total, rel=2e-3), kind


NEAR = [layout for layout in LAYOUTS if layout.mfu and "torchtitan" not in layout.source][:-1]
KEEPING_ALL = LAYOUTS[:6:2]
BOUNDS = [1.13, 1.12, 1.10]
"""The Llama 3 paper's: they fit its GPUs here where operators are checkpointed alone, as in the next rows."""


def _times_published(layout: Layout) -> float:
    ours = forecast(layout)
    assert layout.mfu
    return (ours.mfu_causal if layout.causal else ours.mfu) / layout.mfu


@pytest.mark.parametrize(
    "layout", [it for it in NEAR if it not in KEEPING_ALL], ids=lambda it: f"{it.name}, {it.ranks}"
)
def test_published_layouts_are_near(layout: Layout) -> None:
    assert _times_published(layout) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(("layout", "bound"), list(zip(KEEPING_ALL, BOUNDS, strict=True)))
def test_layouts_that_compute_nothing_again_are_faster(layout: Layout, bound: float) -> None:
    checkpointed = LAYOUTS[LAYOUTS.index(layout) + 1]
    assert 1.05 * _times_published(checkpointed) < _times_published(layout) < bound


PLAN = """
import time
from dataclasses import replace
from benchmarks.layouts import LAYOUTS, _batch, _mesh, forecast, memory
from toolkit.metrics.memory import resident_bytes
flags = "llama3_405b" + _mesh(8, 16) + _batch(2048) + " --activation_checkpoint.mode full"
layout = replace(LAYOUTS[0], ranks=16384, flags=flags)
peak = memory(layout).peak
forecast(layout)
again = time.process_time()
forecast(layout)
spent = time.process_time() - again
print(time.process_time(), spent, resident_bytes()[1], peak)
"""


@pytest.mark.slow
def test_405b_on_16384_ranks_is_planned_in_a_minute() -> None:
    done = subprocess.run([sys.executable, "-c", PLAN], check=True, capture_output=True, text=True, cwd=ROOT)
    seconds, again, resident, peak = map(float, done.stdout.split())
    assert seconds < 60 and again < 0.1
    assert resident < 2 * 2**30
    assert peak < 80 * 2**30
