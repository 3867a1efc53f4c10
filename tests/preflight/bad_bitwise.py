"""Runs that break the rules of ``rules.bitwise``."""

from __future__ import annotations

from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.preflight.bad_runs import H100, Bad, bad

FOREACH = "debug.bitwise_data_parallel optimizer.implementation=foreach"
ON = f"{FOREACH} training.global_batch_size=8 training.local_batch_size=2"
PP, PIPELINE = "parallelism.pipeline_parallel_degree=2", "parallelism.pipeline_parallel_"
RUNS, SAME = "bitwise_data_parallel_runs", "micro_batches_are_the_same"
BATCH = "training.global_batch_size"

CASES: list[Bad] = [
    bad(RUNS, f"{PIPELINE}schedule=ZBVZeroBubble {PP} {ON}", "after each batch, in order", "1F1B", world=2),
    bad(
        RUNS,
        f"{PIPELINE}schedule_csv=schedule.csv {PP} {ON}",
        "after each batch, in order",
        "remove it",
        world=2,
        prepare=lambda folder: (folder / "schedule.csv").write_text("0F0\n1F0\n"),
    ),
    bad(RUNS, f"{PIPELINE}microbatch_size=4 {PP} {ON}", "must divide training.local_batch_size", world=2),
    bad(
        RUNS, f"{PP} {PIPELINE}microbatch_size=2 model.name=experts {ON}", "losses of their routers", world=2
    ),
    bad(RUNS, f"parallelism.expert_parallel_degree=2 model.name=experts {ON}", "of several ranks", world=2),
    bad(RUNS, f"parallelism.fsdp_sync_each_batch=false {ON}", "of each micro-batch", "set it to true"),
    bad(
        RUNS,
        f"optimizer.early_step_in_backward=true training.max_norm=inf {FOREACH} "
        "training.global_batch_size=2 training.local_batch_size=2",
        "after all gradients are summed",
    ),
    bad(
        RUNS,
        f"optimizer.implementation=fused {ON}".replace("optimizer.implementation=foreach", ""),
        "rounds the last elements of a shard",
        'set it to "foreach"',
    ),
    bad(RUNS, f"model.converters=float8 {ON}", "computed from shards", "remove it", hardware=H100),
    bad(RUNS, f"data.streaming=true {ON}", "streams divide samples over ranks by file"),
    bad(
        SAME,
        f"training.global_batch_size=-1 training.local_batch_size=2 {FOREACH}",
        "needs a global batch that does not follow",
        "set it to a multiple of 4, such as 4",
        world=2,
    ),
    bad(
        SAME,
        f"training.global_batch_size=12 training.local_batch_size=4 {FOREACH}",
        "must be a multiple of training.local_batch_size × data-parallel ranks, which is 4 × 2",
        "set it to 16",
        world=2,
    ),
]
