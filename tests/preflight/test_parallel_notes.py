"""Notes on layouts that are allowed: waiting, slow networks, options that change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preflight.bad_runs import CP, CPU, H100, PP, SMALL, TP, configure
from toolkit.hardware import Hardware
from toolkit.preflight import check, describe, notes

SCHEDULE = "--parallelism.pipeline_parallel_schedule"
SIZE = "--parallelism.pipeline_parallel_microbatch_size"
BATCH = "--training.global_batch_size"
PIPELINE = f"--{PP}=2"
PREFETCH = "--parallelism.fsdp_forward_prefetch=2"
WHOLE_ROWS = "--data.document_mask=false"
RESHARD = "--parallelism.fsdp_reshard_after_forward"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.preflight.planned_run.torch_version", lambda: (2, 13))


@pytest.mark.parametrize(
    ("flags", "world", "note"),
    [
        # 1 of 3 units of time is waited with 2 micro-batches, 1 of 5 with 4.
        (
            [PIPELINE, f"{BATCH}=2"],
            2,
            "ranks idle for about 33% of a step: 2 micro-batches per step on 2 ranks with 1F1B; "
            f"with 4 it is 20%: set {BATCH[2:]} to 4",
        ),
        (
            [PIPELINE, f"{BATCH}=8", f"{SIZE}=2"],
            4,
            "with 4 it is 20%: set training.global_batch_size to 16, or",
        ),
        ([PIPELINE, f"{BATCH}=-1", "--training.local_batch_size=3"], 2, "training.local_batch_size to 4"),
        # 3 / (3 + 2·m) is at most a fifth from 6 on, and torch takes 6 and 8 of 7.
        (
            [f"--{PP}=4", "--model.n_layers=14", f"{SCHEDULE}=Interleaved1F1B", f"{BATCH}=4"],
            4,
            "with 6 it is 20%",
        ),
        (
            [PIPELINE, f"{SCHEDULE}=LoopedBFS", PREFETCH],
            4,
            "fsdp_forward_prefetch has no effect without one stage per rank, or resharding",
        ),
        (
            [
                PIPELINE,
                f"{SCHEDULE}=ZBVZeroBubble",
                "--parallelism.fsdp_reshard_after_forward=never",
                "--compile.enable",
            ],
            2,
            "ZBVZeroBubble runs each block's backward twice, for inputs and for weights; to compute less, "
            'set compile.enable = false, or set parallelism.pipeline_parallel_schedule to "Interleaved1F1B"',
        ),
        (
            [PIPELINE, f"{SCHEDULE}=DualPipeV", f"{RESHARD}=never", "--activation_checkpoint.mode=full"],
            2,
            'activation_checkpoint.mode = "full": DualPipeV computes weight gradients '
            "separately, for which torch recomputes a checkpointed block once per weight",
        ),
        (
            # Blocks are not compiled, and computed again for each of their weights.
            [
                *(PIPELINE, f"{SCHEDULE}=ZBVZeroBubble", f"{RESHARD}=never"),
                *("--activation_checkpoint.mode=full", "--compile.enable", "--compile.components=loss"),
            ],
            2,
            'activation_checkpoint.mode = "full": ZBVZeroBubble computes',
        ),
        (
            [PIPELINE, "--parallelism.fsdp_sync_each_batch=false"],
            2,
            "fsdp_sync_each_batch has no effect without parallelism.pipeline_parallel_degree = 1",
        ),
        (
            [
                PIPELINE,
                '--parallelism.module_fqns_per_model_part=[["tok_embeddings"],["layers.0","norm","output"]]',
                "--model.n_layers=1",
                "--parallelism.pipeline_parallel_layers_per_stage=3",
            ],
            2,
            "layers_per_stage has no effect without stages cut by counts of layers",
        ),
        (
            [f"--{CP}=2", "--parallelism.sharding_strategy=NO_SHARD"],
            4,
            "which is still sharded over the 2 ranks of parallelism.context_parallel_degree",
        ),
        ([f"--{TP}=2", "--parallelism.disable_loss_parallel"], 2, "gathers all logits on each of 2 ranks"),
    ],
)
def test_note(flags: list[str], world: int, note: str) -> None:
    said = notes(configure(flags), world_size=world, hardware=CPU)
    assert len([line for line in said if note in line]) == 1
    assert check(configure(flags), world_size=world, hardware=CPU) == []


@pytest.mark.parametrize(
    "flags",
    [
        [PIPELINE],
        [PIPELINE, f"{SCHEDULE}=ZBVZeroBubble", f"{BATCH}=4", "--activation_checkpoint.mode=none"],
        [f"--{TP}=2"],
        # Parameters are sharded over the ranks of cp as well.
        [f"--{CP}=2", PREFETCH],
    ],
)
def test_nothing_is_said_of_what_is_well(flags: list[str]) -> None:
    config = configure(flags)
    assert check(config, world_size=2, hardware=CPU) == []
    assert notes(config, world_size=2, hardware=CPU) == []


def test_depths_of_prefetching_act_where_each_micro_batch_gathers_again() -> None:
    config = configure([PIPELINE, f"{SCHEDULE}=LoopedBFS", f"{RESHARD}=always", PREFETCH])
    assert notes(config, world_size=4, hardware=CPU) == []


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "NGPU"])
def test_tensor_parallelism_across_nodes_is_slow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure([f"--{TP}=16", *SMALL[2:]])
    assert notes(config, world_size=16, hardware=H100) == []
    monkeypatch.setenv(name, "8")
    (said,) = notes(config, world_size=16, hardware=H100)
    assert "16 is more than the 8 ranks of a node" in said
    monkeypatch.setenv(name, "16")
    assert notes(config, world_size=16, hardware=H100) == []


def test_async_tensor_parallelism_has_its_place() -> None:
    compiled = ["--compile.enable", "--compile.cache_folder=cache"]
    config = configure([f"--{TP}=2", "--parallelism.enable_async_tensor_parallel", *compiled])
    assert check(config, world_size=2, hardware=H100) == []
    a100 = Hardware("cuda", "NVIDIA A100", 8, native_bf16=True, capability=8.0)
    assert [problem.key for problem in check(config, world_size=2, hardware=a100)] == [
        "parallelism.enable_async_tensor_parallel"
    ]


def test_a_ring_within_documents_gathers_on_cuda_and_says_so() -> None:
    ring = [f"--{CP}=2", "--parallelism.context_parallel_rotate_method=alltoall"]
    for flags, hardware, said in ((ring, H100, 1), (ring, CPU, 0), ([*ring, WHOLE_ROWS], H100, 0)):
        config = configure(flags)
        assert check(config, world_size=2, hardware=hardware) == []
        assert sum("gathers, as" in note for note in notes(config, world_size=2, hardware=hardware)) == said


def test_a_schedule_of_ones_own_is_taken(tmp_path: Path) -> None:
    # ZB-V on 2 ranks with 1 micro-batch, and a pair of actions at once.
    lines = "0F0,3F0,3I0,0F1,3W0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2B0,2F1,1B0,2B1,1B1\n"
    (tmp_path / "own.csv").write_text(lines)
    flags = [PIPELINE, f"{BATCH}=2", f"{SCHEDULE}=ZBVZeroBubble"]
    config = configure([*flags, "--parallelism.pipeline_parallel_schedule_csv=own.csv"])
    assert check(config, world_size=2, hardware=CPU) == []


# torchtitan's tests/assets/custom_schedule.csv begins with all forwards and goes on so.
_TITAN = "0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1\n1F0,1F1,3F0,3F1,3I0,3W0,3I1,3W1,1I0,1W0,1I1,1W1\n"


@pytest.mark.parametrize(
    ("name", "lines"),
    [("PipelineScheduleMulti", _TITAN), ("PipelineScheduleSingle", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")],
)
def test_torchtitans_names_beside_a_file(tmp_path: Path, name: str, lines: str) -> None:
    (tmp_path / "own.csv").write_text(lines)
    flags = [PIPELINE, f"{BATCH}=2", f"{SCHEDULE}={name}", "--activation_checkpoint.mode=none"]
    config = configure([*flags, "--parallelism.pipeline_parallel_schedule_csv=own.csv"])
    assert check(config, world_size=2, hardware=CPU) == []
    assert "schedule of own.csv" in describe(config, world_size=2, hardware=CPU)


def test_the_summary_counts_micro_batches() -> None:
    config = configure([PIPELINE, f"{SIZE}=2"])
    said = describe(config, world_size=4, hardware=CPU)
    assert "16 samples (2 data-parallel × 4 micro-batches of 2)" in said
