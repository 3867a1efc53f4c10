"""Rules for skipping batches, rolling back and detecting slow ranks."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, rule

POLICIES = ("health.nan_policy", "health.loss_spike_policy")


@rule()
def policies_can_act(run: PlannedRun) -> Iterator[Problem]:
    """Check that a batch can be skipped before its update, and that full checkpoints exist for rollbacks."""
    config = run.config
    rolls_back = [key for key in POLICIES if config.value(key) == "rollback"]
    skips = [key for key in POLICIES if config.value(key) == "skip"]
    if skips and config.optimizer.early_step_in_backward:
        rule = "optimizer.early_step_in_backward updates parameters before loss and gradient norm are known"
        fix = "remove that, or set the policy to rollback, which restores the parameters"
        yield from (run.problem(key, rule, fix) for key in skips)
    options = config.checkpoint
    if not options.enable or options.load_only:
        rule = "rolls back to the newest checkpoint, but this run saves none"
        fix = "set checkpoint.enable without checkpoint.load_only, or the policy to skip"
        yield from (run.problem(key, rule, fix) for key in rolls_back)
    elif options.exclude_from_loading:
        rule = "restores full checkpoints, but checkpoint.exclude_from_loading leaves components out"
        fix = "remove that, or set the policy to skip"
        yield from (run.problem(key, rule, fix) for key in rolls_back)


@rule()
def stragglers_measurable(run: PlannedRun) -> list[Problem]:
    """Check that the flight recorder, which measures ranks on GPUs, records collectives."""
    if run.config.health.straggler_factor is None or run.hardware.device == "cpu":
        return []
    if run.config.comm.trace_buf_size:
        return []
    rule = "on GPUs needs the flight recorder, which comm.trace_buf_size = 0 disables"
    fix = "set comm.trace_buf_size to more than the number of collectives between two logged steps"
    return [run.problem("health.straggler_factor", rule, fix)]
