"""Runs that break the rules of ``rules.bitwise``."""

from __future__ import annotations

from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.preflight.bad_runs import Bad, bad

ON = "debug.bitwise_data_parallel training.global_batch_size=8 training.local_batch_size=2"
RUNS, SAME = "bitwise_data_parallel_runs", "micro_batches_are_the_same"
BATCH = "training.global_batch_size"

CASES: list[Bad] = [
    bad(RUNS, f"parallelism.pipeline_parallel_degree=2 {ON}", "adds the gradients of its micro-batches", world=2),
    bad(RUNS, f"parallelism.expert_parallel_degree=2 model.name=experts {ON}", "rows of several ranks", world=2),
    bad(RUNS, f"parallelism.fsdp_sync_each_batch=false {ON}", "of each micro-batch", "set it to true"),
    bad(
        RUNS,
        f"optimizer.early_step_in_backward=true training.max_norm=inf training.global_batch_size=2 "
        "training.local_batch_size=2 debug.bitwise_data_parallel",
        "after all gradients are summed",
    ),
    bad(RUNS, f"data.streaming=true {ON}", "streams divide samples over ranks by file"),
    bad(SAME, "training.global_batch_size=-1 debug.bitwise_data_parallel training.local_batch_size=2",
        "needs a global batch that does not follow", "set it to a multiple of 4, such as 4", world=2),
    bad(SAME, "training.global_batch_size=12 debug.bitwise_data_parallel training.local_batch_size=4",
        "must be a multiple of training.local_batch_size × data-parallel ranks, which is 4 × 2",
        "set it to 16", world=2),
]  # fmt: skip
