"""The search for a layout: its estimate of memory, its order, what it writes, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from toolkit.cli import run_command
from toolkit.commands import plan
from toolkit.config import Config, load_config
from toolkit.errors import DataError
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import model_args
from toolkit.models.parameters import parameter_count
from toolkit.optim import grad_clip
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.planner.estimate import Estimate, estimate, in_flight, samples, state_bytes
from toolkit.planner.fake_step import step_memory
from toolkit.planner.layouts import with_settings
from toolkit.planner.machines import find_machine
from toolkit.planner.ranking_text import breakdown_lines
from toolkit.planner.search import Candidate, SearchResult, _Queue, min_step_seconds, search, usable_memory
from toolkit.planner.time import step_time
from toolkit.preflight import raise_problems

ROOT = Path(__file__).parents[2]
DEBUG = ROOT / "train_configs/debug_model.toml"
_ONE_B = """--model.name llama3.2 --model.flavor 1B --model.n_layers 4 --training.seq_len 2048
--training.global_batch_size 8 --training.local_batch_size 1 --activation_checkpoint.mode none"""
_TOML = """extends = "{debug}"
[model]
n_layers = 2
[training]
local_batch_size = 1
global_batch_size = -1
[parallelism]
sharding_strategy = "FULL_SHARD"
"""
H100 = find_machine("h100")


def configured(flags: str) -> tuple[Config, ModelArgs]:
    config = load_config(flags.split())
    return config, model_args(config, tokenizer_vocab=None)


LAYOUTS = {
    "fsdp": "",
    "tp op": "--parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode selective "
    "--activation_checkpoint.selective_ac_option op",
    "tp, whole logits": "--parallelism.tensor_parallel_degree 2 --parallelism.disable_loss_parallel",
    "in backward": "--optimizer.early_step_in_backward --training.max_norm inf "
    "--training.global_batch_size 1",
    "offload": "--training.enable_cpu_offload",
    "pp full": "--parallelism.pipeline_parallel_degree 2 --activation_checkpoint.mode full",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_estimate_is_near_a_fake_step(layout: str) -> None:
    config, args = configured(f"{_ONE_B} {LAYOUTS[layout]}")
    world = min(4, config.training.global_batch_size)
    mesh = degrees(config.parallelism, world)
    assert mesh
    dtype = torch.bfloat16
    found = estimate(config, args, mesh, state_bytes(config, args, dtype), dtype)
    rank = found.rank * (world // mesh.pp)
    peak = step_memory(config, args, mesh, rank, param_dtype=dtype, target="cuda").peak
    assert found.bytes == pytest.approx(peak, rel=0.05)


_EP = "--parallelism.expert_parallel_degree"
_EXPERTS = """--model.name qwen3_moe --model.flavor debugmodel --model.n_layers 4 --model.dim 512
--training.seq_len 512 --training.global_batch_size 8 --training.local_batch_size 1"""
EXPERTS = {
    "ep": f"{_EXPERTS} {_EP} 2 --activation_checkpoint.mode none",
    "ep full": f"{_EXPERTS} {_EP} 4 --activation_checkpoint.mode full",
    "ep op tp": f"{_EXPERTS} {_EP} 4 {LAYOUTS['tp op']}",
    "ep cp": f"{_EXPERTS} {_EP} 4 --parallelism.context_parallel_degree 2 --activation_checkpoint.mode none",
    "ep etp": f"{_EXPERTS} {_EP} 2 --parallelism.expert_tensor_parallel_degree 2 {LAYOUTS['tp op']}",
    "ep pp": f"{_EXPERTS} {_EP} 2 --parallelism.pipeline_parallel_degree 2 --activation_checkpoint.mode full",
    "replicas": f"{_EXPERTS} {_EP} 2 --parallelism.data_parallel_replicate_degree 2",
    "dense first": "--model.name deepseek_v3 --model.flavor debugmodel --model.n_layers 5 --model.dim 512 "
    f"--training.seq_len 512 --training.global_batch_size 8 --training.local_batch_size 1 {_EP} 2",
}


IN_CI = ("ep op tp", "ep pp", "dense first")


@pytest.mark.parametrize(
    "layout",
    [it if it in IN_CI else pytest.param(it, marks=pytest.mark.exhaustive) for it in EXPERTS],
)
def test_the_estimate_of_experts_is_near_a_fake_step(layout: str) -> None:
    config, args = configured(EXPERTS[layout])
    if layout == "dense first":
        assert args.moe
        args = replace(args, moe=replace(args.moe, first_dense=3))
    mesh, dtype = degrees(config.parallelism, 8), torch.bfloat16
    assert mesh
    found = estimate(config, args, mesh, state_bytes(config, args, dtype), dtype)
    rank = found.rank * (8 // mesh.pp)
    peak = step_memory(config, args, mesh, rank, param_dtype=dtype, target="cuda").peak
    assert found.bytes == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
def test_degrees_of_experts_are_searched() -> None:
    flags = f"{_EXPERTS} --activation_checkpoint.mode none"
    for compiled in ("", " --compile.enable"):
        config, args = configured(flags + compiled)
        found = search(config, args, 2, H100, param_dtype=torch.bfloat16, top=100)
        tried = {it.layout.ep for it in found.ranked}
        assert tried == {1, 2}
        assert all(it.config.parallelism.expert_parallel_degree == it.layout.ep for it in found.ranked)
        assert any("ep" in it.time.exposed for it in found.ranked if it.time)


def test_inputs_of_blocks_that_wait_on_the_host_take_no_room() -> None:
    flags = f"{_ONE_B} --training.seq_len 8192 --activation_checkpoint.mode full"
    peaks = []
    for offload in ("", " --activation_checkpoint.enable_activation_offloading"):
        config, args = configured(flags + offload)
        mesh, dtype = degrees(config.parallelism, 4), torch.bfloat16
        assert mesh
        peaks.append(step_memory(config, args, mesh, 0, param_dtype=dtype, target="cuda").peak)
        said = estimate(config, args, mesh, state_bytes(config, args, dtype), dtype).bytes
        assert said == pytest.approx(peaks[-1], rel=0.01)
    assert peaks[0] - peaks[1] == args.n_layers * 8192 * args.dim * dtype.itemsize


def test_ranks_of_a_pipeline_keep_what_their_schedule_has_in_flight() -> None:
    assert [in_flight("1F1B", 4, rank, 4, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight("GPipe", 4, 3, 4, 8) == 8
    assert in_flight("Interleaved1F1B", 2, 0, 4, 4) == 5  # 2 rounds' forwards, 2 to the last rank, 1 in work


def _states_fit(flags: str, world: int, memory: float) -> bool:
    config, args = configured(flags)
    mesh = degrees(config.parallelism, world)
    assert mesh
    dtype = torch.bfloat16
    found = estimate(config, args, mesh, state_bytes(config, args, dtype), dtype)
    return found.bytes <= usable_memory(replace(H100, memory=memory * 2**30))


_WIDE = """--model.name llama3 --model.flavor 8B --model.n_heads 16 --model.n_kv_heads 16
--model.vocab_size 32000 --training.seq_len 512 --training.local_batch_size 1 --training.global_batch_size 4
--activation_checkpoint.mode full"""
_DDP = f"{_WIDE} --parallelism.data_parallel_replicate_degree 4 --model.dim 1536 --model.ffn_dim 4096"
_FSDP = f"{_WIDE} --model.dim 2560 --model.ffn_dim 6912"


def test_on_16_gb_ddp_reaches_700_million_parameters_and_fsdp_on_four_gpus_3_billion() -> None:
    for flags, layers, more in ((_DDP, 21, 28), (_FSDP, 36, 48)):
        sizes = [parameter_count(configured(f"{flags} --model.n_layers {it}")[1]) for it in (layers, more)]
        low, high = (0.68e9, 0.9e9) if flags is _DDP else (2.8e9, 4e9)
        assert low <= sizes[0] < sizes[1] <= high
        assert _states_fit(f"{flags} --model.n_layers {layers}", 4, 16)
        assert not _states_fit(f"{flags} --model.n_layers {more}", 4, 16)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "asked.toml"
    file.write_text(_TOML.format(debug=DEBUG))
    return file


def test_what_is_found_keeps_the_batch_and_is_sorted(asked: Path) -> None:
    config = load_config(["--job.config_file", str(asked)])
    args = model_args(config, tokenizer_vocab=4096)
    machine = replace(H100, node=1)
    found = search(config, args, 2, machine, param_dtype=torch.bfloat16, top=4)
    times = [each.seconds for each in found.ranked]
    assert times == sorted(times) and len(times) == 4
    for each in found.ranked:
        rows, count = samples(each.config, each.layout)
        assert rows * count * each.layout.dp == 2
        assert with_settings(config, each.settings) == each.config
        assert each.layout.tp == 1 and each.bytes <= found.capacity
    assert found.rejected["node"].count == 1
    assert not dist.is_initialized()


def test_an_offloaded_model_needs_no_room_for_what_the_host_has(asked: Path) -> None:
    flags = "--training.enable_cpu_offload --model.dim 1024 --model.ffn_dim 8192 --training.seq_len 128"
    config, args = configured(f"--job.config_file {asked} {flags} --model.n_layers 8")
    small = replace(H100, memory=2.8 * 2**30)
    found = search(config, args, 1, small, param_dtype=torch.bfloat16, top=1)
    assert found.ranked[0].peak and found.ranked[0].peak < found.capacity < 0.3 * found.states


def test_4_bits_are_counted_as_half_a_byte(asked: Path) -> None:
    flags = "--finetune.adapter lora --finetune.lora.quantize_base nf4 --model.dim 1024 --model.ffn_dim 4096"
    config, args = configured(f"--job.config_file {asked} {flags}")
    states = search(config, args, 1, H100, param_dtype=torch.bfloat16, top=1).states
    blocks = args.n_layers * (2 * 1024 * 1024 + 2 * 1024 * 1024 // (args.n_heads // args.n_kv_heads))
    blocks += args.n_layers * 3 * 1024 * 4096
    added = 16 * args.n_layers * 8 * (1024 + args.n_heads * args.head_dim)  # of wq
    added += 16 * args.n_layers * 8 * (1024 + args.n_kv_heads * args.head_dim)
    rest = 2 * (parameter_count(args) - blocks)  # frozen in bfloat16
    assert states == pytest.approx(blocks * 4.5 / 8 + added + rest, rel=1e-3)


def test_what_steps_in_backward_accumulates_in_no_layout(asked: Path) -> None:
    flags = "--training.global_batch_size 4 --optimizer.early_step_in_backward --training.max_norm inf"
    config, args = configured(f"--job.config_file {asked} {flags}")
    found = search(config, args, 1, H100, param_dtype=torch.bfloat16)
    assert [samples(each.config, each.layout) for each in found.ranked] == [(4, 1)] * 3
    assert found.rejected["training.global_batch_size"].count == 2


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--training.global_batch_size 4 --model.n_layers 8", marks=pytest.mark.slow),
        "--training.global_batch_size 2 --model.n_layers 16",  # fewer samples than ranks
    ],
)
def test_a_search_finds_what_an_exhaustive_one_does(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, args = configured(f"{_ONE_B} --training.seq_len 16384 {flags}")
    machine = replace(H100, node=2, memory=16 * 2**30)  # on which some layouts do not fit

    def found() -> tuple[list[object], int]:
        told = search(config, args, 4, machine, param_dtype=torch.bfloat16, top=6)
        rows = [(it.settings, it.layout, it.time, it.memory, it.peak) for it in told.ranked]
        return rows, told.timed

    fast, timed = found()
    wait = _Queue._push
    monkeypatch.setattr(
        _Queue, "_push", lambda self, time, look, it=None: wait(self, time if it else 0.0, look, it)
    )
    slow, all_timed = found()
    assert len(fast) == 6 and fast == slow
    assert timed < all_timed


PRODUCTS = replace(H100, bandwidth=1e20, launch=0.0)
"""A GPU on which nothing but products takes time."""
LORA = "--finetune.adapter lora --finetune.lora.target_modules all-linear"
TRAINED = {
    "all": "",
    "all, computed again": "--activation_checkpoint.mode full",
    "all, in 8 bits": "--model.converters float8",
    "lora": LORA,
    "lora, computed again": f"{LORA} --activation_checkpoint.mode full",
    "lora beside a reference": f"{LORA} --finetune.objective dpo",
}


@pytest.mark.parametrize("trained", TRAINED)
def test_a_bound_is_one_and_mfu_counts_what_is_computed(trained: str) -> None:
    config, args = configured(f"{_ONE_B} {TRAINED[trained]}")
    mesh, dtype = ParallelDims(1, 1, 1, 1, 1), torch.bfloat16
    took = step_time(config, args, mesh, PRODUCTS, param_dtype=dtype)
    candidate = Candidate(config, {}, mesh, Estimate(0, {}), took)
    bound = min_step_seconds(config, args, mesh, PRODUCTS, dtype)
    assert 0.5 * took.seconds < bound <= took.seconds
    assert 0.5 < took.mfu < 1
    flops = took.mfu * took.seconds * PRODUCTS.peak["bfloat16"] / (8 * 2048)
    assert f" × {flops / 1e9:,.1f} GFLOP" in "\n".join(
        breakdown_lines(SearchResult(0.0, ranked=[candidate]), args, H100)
    )


def test_the_written_layout_passes_the_preflight(
    asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "planned.toml"
    words = [str(asked), "--gpu", "h100", "--gpus", "2", "--gpus-per-node", "1", "--tokens", "1e9"]
    assert run_command("plan", [*words, "--price", "2.5", "--explain", "--write", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(it in said for it in ("cost", "Rejected layouts, with", "in a fake step", "tp across nodes"))
    config = load_config(["--job.config_file", str(file)])
    raise_problems(config, world_size=2)
    assert config.training.global_batch_size == 2  # that of CONFIG on its own mesh
    first = next(line for line in said.splitlines() if line.startswith("1 "))
    assert str(degrees(config.parallelism, 2)) in first
    assert run_command("plan", [*words, "--write", str(file)]) == 2 and "already" in capsys.readouterr().err


REFUSED = {
    "h1000": ("--gpu h1000 --gpus 8", "did you mean h100"),
    "none": ("--gpu h100 --gpus 0", "whole number from 1"),
    "eleven": ("--gpu h100 --gpus 11", "use 10 h100"),
    "price": ("--gpu h100 --gpus 8 --price 2", "--price needs --tokens"),
    "lost": ("--gpu h100 --gpus 8 --training.steps 5 --write x.toml", "would be lost in a file"),
    "there": (f"--gpu h100 --gpus 8 --write {DEBUG}", "already exists"),
    "nowhere": ("--gpu h100 --gpus 8 --write no/such/x.toml", "no/such is not a writable folder"),
    "one block": (
        "--gpu h100 --gpus 1 --finetune.trainable layers.1.*",
        "finetune.trainable = ",
    ),
    "first blocks": ("--gpu h100 --gpus 1 --finetune.freeze_first_layers 2", "trains only some blocks"),
    "fp32": ("--gpu v100 --gpus 8 --training.mixed_precision_param bfloat16", "only float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_message(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, said = REFUSED[case]
    if "--write" in words:  # is told before the search
        monkeypatch.setattr(plan, "_search", None)
    try:
        code = run_command("plan", [str(DEBUG), *words.split()])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_progress_is_shown_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def model(*_: object) -> None:
        raise DataError("the first thing that takes long")

    monkeypatch.setattr(plan, "_model", model)
    assert run_command("plan", ["train_configs/llama3_405b.toml", "--gpu", "h100", "--gpus", "16384"]) == 3
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "plan: searching layouts of train_configs/llama3_405b.toml on 16384 h100"


def test_a_search_tells_what_it_does(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    config, args = configured(f"--job.config_file {asked}")
    search(config, args, 2, H100, param_dtype=torch.bfloat16, progress=told.append)
    assert told[0].startswith("step time of ")
    assert told[1] == "memory and step time estimated for 1 layouts that fit"
    assert any("fake step" in it for it in told)


def test_a_forecast_takes_no_norm_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_clip, "_chunked_norm", None)
    config, args = configured(_ONE_B)
    mesh = degrees(config.parallelism, 1)
    assert mesh
    assert step_memory(config, args, mesh, 0, param_dtype=torch.bfloat16, target="cuda").peak


def test_7b_does_not_fit_one_gpu_of_80_gb(capsys: pytest.CaptureFixture[str]) -> None:
    config = ROOT / "train_configs/llama2_7b.toml"
    assert run_command("plan", [str(config), "--gpu", "h100", "--gpus", "1"]) == 2
    said = capsys.readouterr().err
    assert "6,738,415,616 parameters do not fit on 1 h100" in said
    assert "weights, gradients and optimizer state alone are 100.4 GiB" in said
    assert "use 2 h100" in said
