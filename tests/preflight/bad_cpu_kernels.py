"""Runs that break the rules of ``rules.cpu_kernels``."""

from __future__ import annotations

from tests.preflight.bad_runs import H100, Bad, bad

CASES: list[Bad] = [
    bad("onednn_is_for_cpus", "model.matmul=onednn", "on CPUs", "remove it", hardware=H100),
]
