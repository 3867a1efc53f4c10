"""Rules about the health of a run: what skips a batch, or rolls back."""

from __future__ import annotations

from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, rule

POLICIES = ("health.nan_policy", "health.loss_spike_policy")


@rule()
def policies_can_act(run: PlannedRun) -> list[Problem]:
    """A batch is skipped before its update, and a roll-back loads a whole checkpoint of this run."""
    config = run.config
    rolls_back = [key for key in POLICIES if config.value(key) == "rollback"]
    skips = [key for key in POLICIES if config.value(key) == "skip"]
    problems = []
    if skips and config.optimizer.early_step_in_backward:
        rule = "optimizer.early_step_in_backward updates parameters before loss and gradient norm are known"
        fix = "leave that out, or set the policy to rollback, which loads the parameters again"
        problems += [run.problem(key, rule, fix) for key in skips]
    options = config.checkpoint
    if not options.enable or options.load_only:
        rule = "rolls back to the newest checkpoint, and this run saves none"
        fix = "set checkpoint.enable without checkpoint.load_only, or the policy to skip"
        problems += [run.problem(key, rule, fix) for key in rolls_back]
    elif options.exclude_from_loading:
        rule = "loads checkpoints whole, and checkpoint.exclude_from_loading leaves parts out of each"
        fix = "leave that out, or set the policy to skip"
        problems += [run.problem(key, rule, fix) for key in rolls_back]
    return problems


@rule()
def stragglers_are_seen(run: PlannedRun) -> list[Problem]:
    """Ranks on GPUs are compared by what the flight recorder remembers of their collectives."""
    if run.config.health.straggler_factor is None or run.hardware.device == "cpu":
        return []
    if run.config.comm.trace_buf_size:
        return []
    rule = "on GPUs the flight recorder has the time of collectives, and comm.trace_buf_size turns it off"
    fix = "set comm.trace_buf_size to more than the collectives between two logged steps"
    return [run.problem("health.straggler_factor", rule, fix)]
