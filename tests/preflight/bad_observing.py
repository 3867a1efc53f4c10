"""Runs that break the rules of ``rules_observing``."""

from __future__ import annotations

from tests.preflight.bad_runs import Bad

CASES: list[Bad] = []
