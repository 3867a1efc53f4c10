"""Runs that break the rules of ``rules.nf4``."""

from __future__ import annotations

from tests.models import moe_family  # noqa: F401 (registers the family "experts")
from tests.preflight.bad_runs import TP, Bad, bad

QUANTIZED = "finetune.lora.quantize_base=nf4 finetune.adapter=lora"
EXPERTS = "model.name=experts"
ROWS = "quantized_rows_are_blocks"

CASES: list[Bad] = [
    bad("fsdp_takes_bytes", QUANTIZED, "from torch 2.12 on; this is 2.11", "2.13", torch=(2, 11)),
    bad(ROWS, f"{QUANTIZED} model.ffn_dim=700", "64 elements", "ffn_dim = 700", '"none"'),
    bad(
        ROWS,
        f"{TP}=2 {QUANTIZED} model.ffn_dim=704",
        "splits rows of ffn_dim = 704",
        "set it to 1",
        world=2,
    ),
    bad(ROWS, f"{QUANTIZED} {EXPERTS}", "the width of experts = 12, the width of shared experts = 12"),
    bad(
        ROWS,
        f"{TP}=4 {QUANTIZED} {EXPERTS} model.flavor=wide model.n_kv_heads=4",
        "splits rows of the width of experts = 128, the width of shared experts = 128",
        "set it to 1 or 2",
        world=4,
    ),
    bad(
        "quantized_is_frozen",
        f"finetune.trainable=layers.1.moe.experts.w1 {QUANTIZED} model.name=qwen3_moe",
        "matches layers.1.moe.experts.w1",
    ),
    bad(
        "quantized_is_frozen",
        f"finetune.trainable=norm.weight,layers.0.* {QUANTIZED}",
        '"layers.0.*" matches layers.0.attention.wk.weight',
        "norms",
    ),
]
