"""Runs that break the rules of ``rules.streaming``."""

from __future__ import annotations

from tests.preflight.bad_runs import Bad, bad

_ON = "data.streaming=true"
_RULE = "streams_one_text"
CASES: list[Bad] = [
    bad(_RULE, f"{_ON} data.packing=false", "end to end", "data.streaming = false", key="data.packing"),
    bad(_RULE, f"{_ON} training.epochs=2", "not counted", "training.steps", key="training.epochs"),
    bad(
        _RULE,
        f"{_ON} lr_scheduler.decay_type=step lr_scheduler.decay_ratio=None lr_scheduler.min_lr_factor=0",
        "is not known; set lr_scheduler.step_size",
        key="lr_scheduler.decay_type",
    ),
    bad(_RULE, f"{_ON} data.mixture.a.weight=1", "needs the lengths"),
    bad(
        "corpus_readable",
        "training.dataset_path=s3://bucket/text.jsonl",
        "text at a URL can only be streamed",
        "data.streaming = true",
        key="training.dataset_path",
    ),
]
