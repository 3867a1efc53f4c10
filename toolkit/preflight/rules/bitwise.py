"""Rules for results that are bitwise equal at any number of data-parallel ranks."""

from __future__ import annotations

from toolkit.errors import Problem, join_or
from toolkit.preflight.planned_run import PlannedRun, rule

_KEY = "debug.bitwise_data_parallel"
_OPTIMIZERS = ("AdamW", "Adam", "AdamW8bit", "Muon")
_SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B")
_GLOBAL, _LOCAL = "training.global_batch_size", "training.local_batch_size"


@rule()
def bitwise_data_parallel_runs(run: PlannedRun) -> list[Problem]:
    """Reject options whose order of summation depends on the number of ranks."""
    config = run.config
    if not config.debug.bitwise_data_parallel:
        return []
    options = config.parallelism
    is_piped = options.pipeline_parallel_degree > 1
    refused = {
        "parallelism.pipeline_parallel_schedule": (
            is_piped and options.pipeline_parallel_schedule not in _SCHEDULES,
            "gradients are reduced after each batch, in order",
            f"set it to {join_or(_SCHEDULES)}",
        ),
        "parallelism.pipeline_parallel_schedule_csv": (
            is_piped and bool(options.pipeline_parallel_schedule_csv),
            "gradients are reduced after each batch, in order",
            "remove it",
        ),
        "parallelism.pipeline_parallel_degree": (
            is_piped and run.model is not None and run.model.moe is not None,
            "stages add up the losses of their routers",
            "set it to 1",
        ),
        "parallelism.pipeline_parallel_microbatch_size": (
            is_piped and config.training.local_batch_size % options.pipeline_parallel_microbatch_size > 0,
            f"it must divide {_LOCAL}, which is {config.training.local_batch_size}",
            f"set {_LOCAL} to a multiple of it",
        ),
        "parallelism.expert_parallel_degree": (
            options.expert_parallel_degree > 1,
            "experts add the rows of several ranks",
            "set it to 1",
        ),
        "parallelism.fsdp_sync_each_batch": (
            not options.fsdp_sync_each_batch,
            "ranks exchange the gradients of each micro-batch",
            "set it to true",
        ),
        "optimizer.early_step_in_backward": (
            config.optimizer.early_step_in_backward,
            "parameters are updated after all gradients are summed",
            "set it to false",
        ),
        "optimizer.name": (
            config.optimizer.name not in _OPTIMIZERS,
            "the update of a registered optimizer may depend on how parameters are sharded",
            f"set it to {join_or(_OPTIMIZERS)}",
        ),
        "optimizer.implementation": (
            config.optimizer.implementation == "fused" and config.optimizer.name != "AdamW8bit",
            "the fused kernel rounds the last elements of a shard in another way than the others",
            'set it to "foreach"',
        ),
        "model.converters": (
            bool(config.model.converters),
            "float8 scales and custom converters are computed from shards",
            "remove it",
        ),
        "data.streaming": (
            config.data.streaming,
            "streams divide samples over ranks by file",
            "set it to false, which tokenizes first",
        ),
    }
    return [
        run.problem(key, f"not with {_KEY}: {why}", fix, _KEY)
        for key, (is_broken, why, fix) in refused.items()
        if is_broken
    ]


@rule()
def micro_batches_are_the_same(run: PlannedRun) -> list[Problem]:
    """Check that the micro-batch is local_batch_size, not a smaller divisor that depends on the ranks."""
    training, mesh = run.config.training, run.mesh
    if not run.config.debug.bitwise_data_parallel or mesh is None:
        return []
    total, local = training.global_batch_size, training.local_batch_size
    each = local * mesh.dp
    if total == -1:
        rule = f"{_KEY} needs a global batch that does not follow the number of ranks"
        return [run.problem(_GLOBAL, rule, f"set it to a multiple of {each}, such as {each}", _KEY)]
    if total % each == 0:
        return []
    rule = f"with {_KEY}, must be a multiple of {_LOCAL} × data-parallel ranks, which is {local} × {mesh.dp}"
    near = max(1, round(total / each)) * each
    return [run.problem(_GLOBAL, rule, f"set it to {near}, or change {_LOCAL}", _LOCAL)]
