"""Runs that break the rules of ``rules.adamw_8bit``."""

from __future__ import annotations

from tests.preflight.bad_runs import TP, Bad, bad

NAME = "optimizer.name=AdamW8bit"

CASES: list[Bad] = [
    bad("some_moments_have_8_bits", f"{NAME} model.dim=128 model.ffn_dim=384", "multiple of 256", '"AdamW"'),
    bad(
        "some_moments_have_8_bits", f"{NAME} finetune.trainable=*norm.weight", "no trained matrix", '"AdamW"'
    ),
    # The 768 of w2 would be 384 on each of two ranks; the 256 of wo 128.
    bad(
        "shards_of_rows_are_blocks",
        f"{TP}=2 {NAME}",
        "splits rows of 256, 768 elements",
        "set it to 1, or",
        world=2,
    ),
    bad(
        "shards_of_rows_are_blocks",
        f"{TP}=4 {NAME} model.dim=1024 model.n_heads=8 model.n_kv_heads=4 model.ffn_dim=1536",
        "splits rows of 1536 elements",
        "set it to 1 or 2, or",
        world=4,
    ),
    bad("options_act", f"optimizer.implementation=foreach {NAME}", "has no effect", '"Adam"'),
]
