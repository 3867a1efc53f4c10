"""Runs that break the rules of ``rules.muon``."""

from __future__ import annotations

from tests.preflight.bad_runs import Bad, bad

NAME = "optimizer.name=Muon"
EARLY = "optimizer.early_step_in_backward"

CASES: list[Bad] = [
    bad("some_matrices_are_trained", f"{NAME} finetune.adapter=lora", "none is trained", '"AdamW"'),
    bad("some_matrices_are_trained", f"{NAME} finetune.trainable=*norm.weight", "finetune.trainable"),
    bad(
        "muon_steps_after_backward",
        f"{EARLY} {NAME} training.max_norm=inf training.global_batch_size=8",
        "optimizer.name = Muon",
        "remove it",
    ),
    bad("options_act", "optimizer.muon.momentum=0.9", "has no effect", '"Muon"'),
    bad("options_act", "optimizer.muon.ns_steps=3 optimizer.name=Adam", "has no effect", '"Muon"'),
]
