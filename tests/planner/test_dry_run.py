"""A run of any size described by one process: what it says, how long it takes, and what it refuses."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from toolkit import train
from toolkit.config import load_config
from toolkit.errors import ConfigError
from toolkit.hardware import detect
from toolkit.parallel.dims import ParallelDims
from toolkit.parallel.mesh import build_mesh
from toolkit.planner import fake_step
from toolkit.planner.allocations import StepMemory
from toolkit.planner.dry_run import (
    _abbreviate,
    _module_names,
    _ranges,
    _size,
    coordinates,
    plan_run,
    strides,
    target,
    world_size,
)
from toolkit.planner.memory import fake_world
from toolkit.preflight import check

ROOT = Path(__file__).parents[2]
GIB = 2**30

degree = st.integers(1, 7)


@given(st.builds(ParallelDims, degree, degree, degree, degree, degree), st.data())
def test_every_rank_has_its_own_coordinates(layout: ParallelDims, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.world_size - 1))
    place, apart = coordinates(layout, rank), strides(layout)
    assert all(0 <= place[name] < getattr(layout, name) for name in apart)
    assert sum(place[name] * apart[name] for name in apart) == rank


def test_neighbours_are_those_of_the_mesh() -> None:
    layout = ParallelDims(pp=3, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    for rank in (0, 21, 47):
        with fake_world(rank, layout.world_size):
            mesh = build_mesh(torch.device("cpu"), pp=3, dp_replicate=2, dp_shard=2, cp=2, tp=2)
            groups = {name: getattr(mesh, name).get_group() for name in ("pp", "cp", "tp")}
            groups["dp_replicate"] = mesh.fsdp["dp_replicate"].get_group()
            found = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
            sharded = dist.get_process_group_ranks(mesh.fsdp["dp_shard_cp"].get_group())
        place, apart = coordinates(layout, rank), strides(layout)
        for name, ranks in found.items():
            first = rank - place[name] * apart[name]
            assert ranks == [first + step * apart[name] for step in range(getattr(layout, name))]
        assert sharded == [
            r
            for r in range(layout.world_size)
            if all(coordinates(layout, r)[name] == place[name] for name in ("pp", "dp_replicate", "tp"))
        ]


def test_the_world_is_a_launchs() -> None:
    assert world_size({"NGPU": "8", "NNODES": "2048", "WORLD_SIZE": "3"}, "auto") == 16384
    assert world_size({"NGPU": "16384"}, "auto") == 16384
    assert world_size({"WORLD_SIZE": "24"}, "auto") == 24  # as torchrun says it
    assert world_size({"NGPU": "", "NNODES": "3"}, "auto") == 3 * detect().count
    with pytest.raises(ConfigError, match="NGPU"):
        world_size({"NGPU": "many"}, "auto")


def test_of_a_list_of_meshes_the_largest_is_described() -> None:
    meshes = ["--parallelism.elastic_meshes=dp_shard=2,dp_shard=2 tp=2"]
    run = plan_run(load_config(meshes), {"NGPU": "2", "NNODES": "1:3"}, meshes)
    assert run.mesh and (run.world_size, run.mesh.tp) == (4, 2)
    assert plan_run(load_config(meshes), {"NGPU": "2", "NNODES": "3"}, meshes).world_size == 6


def test_a_machine_without_gpus_checks_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    detect.cache_clear()
    try:
        assert target({}, "auto").device == "cuda" and "none on this machine" in target({}, "auto").name
        assert target({"CUDA_VISIBLE_DEVICES": ""}, "auto").device == "cpu"
        assert target({}, "cpu").device == "cpu"
    finally:
        detect.cache_clear()


def test_words() -> None:
    assert _ranges([0, 1, 2, 7, 9, 10]) == "0–2, 7, 9–10"
    assert _abbreviate(list("abcd")) == "a, b, c, d" and _abbreviate(list("abcde")) == "a, b, c, …, e"
    assert _module_names(["tok_embeddings", "layers.0", "layers.1"]) == "tok_embeddings, layers 0–1 (2)"
    assert _module_names(["layers.4", "norm", "output"]) == "layer 4, norm, output"
    assert (
        _module_names(["tok_embeddings"]) == "tok_embeddings"
        and _module_names(["norm", "output"]) == "norm, output"
    )
    assert [_size(n) for n in (7, 1536, 3 << 30)] == ["7 bytes", "1.50 KiB", "3.00 GiB"]


def _dry(
    *flags: str, program: str = "toolkit.launch", **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", program, "--comm.mode", "fake_backend", *flags],
        cwd=ROOT,
        env=inherited | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
        timeout=170,
    )


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


DEBUG = ("--job.config_file", "train_configs/debug_model.toml", "--job.dump_folder", "outputs/of_no_run")
MESH = (
    "--parallelism.tensor_parallel_degree=2",
    "--parallelism.pipeline_parallel_degree=4",
    "--parallelism.pipeline_parallel_first_stage_less_layers=0",
    "--parallelism.pipeline_parallel_last_stage_less_layers=0",
    "--training.global_batch_size=32",
)


def test_what_is_said(tmp_path: Path) -> None:
    folder = f"--job.dump_folder={tmp_path / 'run'}"
    done = _dry(*DEBUG, *MESH, folder, "--training.mixed_precision_param=float32", NGPU="16", NNODES="2")
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "run").exists()
    said = _lines(done.stdout)
    assert "mesh   pp 4 × dp_shard 4 × tp 2 on CPU" in done.stdout
    assert "rank = 8·pp + 2·dp_shard + tp; rank 0 is with" in done.stdout
    assert ["dp_shard", "4", "0,", "2,", "4,", "6"] in said
    # 4,096 tokens of 256 numbers; a block: 196,608 in attention, 589,824 in its feed-forward, 512 in norms.
    assert ["0", "0", "1,835,520", "tok_embeddings,", "layer", "0"] in said
    assert ["3", "24", "1,835,776", "layer", "3,", "norm,", "output"] in said
    # The first, the second, which the third is like, and the last stage.
    assert [words[1] for words in said if words[:1] == ["rank"] and words[1] != "="] == ["0", "8", "24"]
    assert ["same", "on", "ranks", "16"] in said
    # A matrix is cut by tp, then its rows by the 4 ranks of dp_shard.
    assert "layers.0.attention.wq.weight" in done.stdout
    (row,) = [words for words in said if words[:1] == ["layers.1.feed_forward.w2.weight"]]
    assert " ".join(row[1:]) == "256 × 768 → 64 × 384"
    # All but the norms is cut by tp.
    cut, norms = [1048576 + 786432, 786432, 1048576 + 786432], [512, 512, 768]
    bytes_held = [matrices // 8 * 4 + norm // 4 * 4 for matrices, norm in zip(cut, norms, strict=True)]
    sizes = [words[1:3] for words in said if words[:1] == ["parameters"]]
    # Held, and as parts of the most that a step takes.
    assert sizes == [[f"{size / 1024:.2f}", "KiB"] for size in bytes_held for _ in range(2)]
    assert re.search(r"\n  peak of a step +\d+\.\d+ MiB  in (for|back)ward of ", done.stdout)
    # Of 8 micro-batches of 256 × 256 hidden states in fp32 a rank of tp hands half to each neighbour. A block
    # gathers them six times and scatters them four times, embedding and head once each; norms' gradients are
    # summed, and three numbers a token. Each unit is gathered once and its gradients reduced once, in parts
    # of three quarters.
    sent = {(words[2], *words[3:5]) for words in said if words[:2] == ["sent", "over"]}
    whole = [matrices // 2 + norm for matrices, norm in zip(cut, norms, strict=True)]
    shards = {("dp_shard", f"{2 * 4 * numbers * 3 / 4 / 2**20:.2f}", "MiB") for numbers in whole}
    assert sent == {("pp", "1.00", "MiB"), ("pp", "2.00", "MiB"), *shards} | {
        ("tp", f"{times + kib / 1024:.2f}", "MiB") for times, kib in ((12, 2), (10, 2), (12, 3 + 24))
    }
    assert "per step: 7.00 MiB all-gather, 5.00 MiB reduce-scatter, 27.00 KiB all-reduce" in done.stdout


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a user who means the CPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE", "NGPU", "NNODES", "LOG_RANK"):
        monkeypatch.delenv(name, raising=False)
    # Runs of other tests take the step that this does not.
    monkeypatch.setattr(fake_step, "step_memory", lambda *_, **__: StepMemory(0, "start", {}, []))
    return monkeypatch


def _main(*flags: str) -> int:
    return train.main(["--comm.mode=fake_backend", *DEBUG, *flags])


def test_the_ranks_asked_for(here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here.setenv("NGPU", "32")
    here.setenv("LOG_RANK", "13,2,99")  # of those that there are, as in a launch
    assert _main(*MESH) == 0
    said = capsys.readouterr().out
    assert "\nrank 2 (pp 0, dp_shard 1, tp 0), stage 0\n" in said
    assert "\nrank 13 (pp 1, dp_shard 2, tp 1), stage 1\n" in said
    assert said.count("optimizer state") == 2 and "alike" not in said


def test_an_estimate_of_memory_is_the_same_report(
    here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main() == 0
    said = capsys.readouterr().out
    assert train.main(["--memory_estimation.enable", *DEBUG]) == 0
    assert capsys.readouterr().out == said and "peak of a step" in said


def test_mistakes_are_those_of_a_start(here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    here.setenv("WORLD_SIZE", "36")
    assert _main(*MESH) == 2
    said = capsys.readouterr()
    assert "does not divide the world size 36" in said.err and said.err.count("error:") == 1
    assert said.out == ""
    done = _dry(*DEBUG, NGPU="many")
    assert done.returncode == 2 and "NGPU = 'many'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--training.dataset_path=/no/corpus"], "training.dataset_path = '/no/corpus': there is no such"),
        (
            ["--training.dataset_path=/no/corpus", "--training.dataset_split=test"],
            "training.dataset_path = '/no/corpus': there is no such",
        ),
        (["--model.hf_assets_path=no/such", "--model.vocab_size=4352"], "model.hf_assets_path = 'no/such'"),
        (["--checkpoint.enable", "--checkpoint.load_step=7"], "checkpoint.load_step = 7"),
        (["--job.dump_folder=README.md/run"], "job.dump_folder = 'README.md/run'"),
    ],
)
def test_a_description_needs_no_files_and_says_what_a_start_would_miss(
    flags: list[str], says: str, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(*flags) == 0
    said = capsys.readouterr()
    assert f"note   a run started here would fail: {says}" in said.out and "optimizer state" in said.out
    assert said.out.count("a run started here would fail") == 1 and said.err == ""


def test_a_note_is_one_line_without_control_characters(
    here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "a\n\x1b[2J").touch()
    assert _main(f"--model.hf_assets_path={tmp_path}", "--model.vocab_size=4352") == 0
    assert (
        f"{tmp_path}': no tokenizer in folder '{tmp_path}': it contains a\\n\\x1b[2J; "
        in capsys.readouterr().out
    )


def test_a_debugmodel_needs_its_tokenizer(
    here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main("--model.hf_assets_path=no/such", "--training.dataset_path=/no/corpus") == 3
    said = capsys.readouterr()
    assert "no/such" in said.err and "/no/corpus" not in said.err and said.out == ""


@pytest.mark.parametrize(
    ("flags", "name", "size", "says"),
    [
        # A block has 786,944 parameters, in halves on two ranks; the embedding has 1,048,576.
        (
            ["--optimizer.early_step_in_backward", "--training.max_norm=inf"],
            "gradients",
            "2.00 MiB",
            "of one",
        ),
        (["--parallelism.sharding_strategy=2"], "all units", "20.01 MiB", "gathered until backward"),
        (
            ["--parallelism.fsdp_sync_each_batch=false", "--training.global_batch_size=16"],
            "unsharded gradients",
            "20.01 MiB",
            "float32, until the last micro-batch",
        ),
    ],
)
def test_what_is_held_beyond_the_shards(
    flags: list[str],
    name: str,
    size: str,
    says: str,
    here: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _main("--training.mixed_precision_param=float32", *flags) == 0
    said = capsys.readouterr().out.splitlines()
    (row,) = [line for line in said if line.startswith(f"  {name} ")]
    assert row.split(maxsplit=len(name.split()))[-1].startswith(size) and says in row
    assert _main("--training.mixed_precision_param=float32") == 0
    plain = capsys.readouterr().out
    assert row not in plain


def test_one_process_for_several_ranks_is_refused() -> None:
    config = load_config([*DEBUG, "--comm.mode=local_tensor"])
    (problem,) = check(config, world_size=4, hardware=detect())
    assert problem.key == "comm.mode" and "one process cannot simulate several ranks" in problem.rule


@pytest.mark.slow
def test_405b_on_16384_ranks() -> None:
    """Under 30 s: the test allows for a busy machine. The parameters of a rank are what arithmetic says."""
    before = os.times()
    done = _dry(
        "--job.config_file=train_configs/llama3_405b.toml",
        "--parallelism.tensor_parallel_degree=8",
        "--parallelism.pipeline_parallel_degree=16",
        "--training.global_batch_size=2048",
        NNODES="2048",
        NGPU="8",
        LOG_RANK="1024",
    )
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert "pp 16 × dp_shard 128 × tp 8" in done.stdout
    assert "rank = 1024·pp + 8·dp_shard + tp" in done.stdout
    block = 2 * 16384 * 128 * (128 + 8) + 3 * 16384 * 53248
    assert f"{8 * block + 8 * 2 * 16384:,}" in done.stdout
    assert math.isclose(block / 1e9, 3.19, rel_tol=0.01)
    assert after.children_user + after.children_system - before.children_user - before.children_system < 60
