"""Runs that break the rules of ``rules.health``."""

from __future__ import annotations

from tests.preflight.bad_runs import H100, Bad, bad

CASES: list[Bad] = [
    bad(
        "stragglers_measurable",
        "health.straggler_factor=3 comm.trace_buf_size=0",
        "comm.trace_buf_size = 0 disables",
        hardware=H100,
    ),
    bad("policies_can_act", "health.nan_policy=rollback", "this run saves none"),
    bad(
        "policies_can_act",
        "health.loss_spike_policy=rollback checkpoint.enable checkpoint.exclude_from_loading=optimizer",
        "checkpoint.exclude_from_loading leaves components out",
    ),
    bad(
        "policies_can_act",
        "health.nan_policy=skip training.max_norm=inf optimizer.early_step_in_backward "
        "training.local_batch_size=16",
        "before loss and gradient norm are known",
        "rollback",
    ),
]
