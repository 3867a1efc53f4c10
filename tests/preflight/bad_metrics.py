"""Runs that break the rules of ``rules.metrics``."""

from __future__ import annotations

from tests.preflight.bad_runs import Bad, bad

CASES: list[Bad] = [
    bad(
        "profiler_fits",
        "profiling.profile_freq=4 profiling.profiler_active=2 profiling.enable_profiling",
        "profiler_warmup + profiler_active = 5 steps",
        "at least 5",
    ),
    bad("options_act", "profiling.enable_memory_snapshot", "has no effect without a GPU"),
    bad("prometheus_file_is_read", "metrics.prometheus_file=run.txt", "only reads", "use run.txt.prom"),
    bad("wandb_ready", "metrics.enable_wandb", "metrics.enable_wandb = True"),
    bad("trackers_ready", "metrics.report_to=comet", "metrics.report_to = ['comet']", "COMET_API_KEY"),
]
