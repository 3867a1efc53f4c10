"""Runs that break the rules of ``rules.float8``."""

from __future__ import annotations

from tests.preflight.bad_runs import CP, H100, PP, TP, V100, Bad, bad

ON = "model.converters=float8"
EMULATED = f"{ON} quantize.linear.float8.emulate"
GATHER = "quantize.linear.float8.enable_fsdp_float8_all_gather"
FILTER = "quantize.linear.float8.filter_fqns"
ROWWISE = "quantize.linear.float8.recipe_name=rowwise"

CASES: list[Bad] = [
    bad("float8_runs", ON, "8.9 or above; this is CPU", "emulate = true"),
    bad("float8_runs", "model.converters=quantize.linear.float8", "this is Tesla V100", hardware=V100),
    bad("float8_runs", f"training.mixed_precision_param=float64 {ON}", "bfloat16", hardware=H100),
    bad(
        "float8_sizes",
        f"{TP}=2 model.ffn_dim=48 {ON}",
        "splits ffn_dim = 48 into shards",
        "no multiple of 16",
        world=2,
        hardware=H100,
    ),
    bad(
        "float8_sizes",
        f"training.seq_len=56 training.local_batch_size=1 {ON}",
        "micro-batches of 56 tokens",
        hardware=H100,
    ),
    bad(
        "float8_sizes",
        f"training.seq_len=120 training.local_batch_size=1 {CP}=2 {ON}",
        "micro-batches of 60 tokens",
        world=2,
        hardware=H100,
    ),
    bad("float8_sizes", f"training.seq_len=56 {PP}=2 {ON}", "of 56 tokens", world=2, hardware=H100),
    bad("float8_filter", f"{FILTER}=ouput {EMULATED}", '"ouput" matches no module', "did you mean output?"),
    bad("float8_filter", f"{FILTER}=output,attention.wz {EMULATED}", '"attention.wz"', "did you mean"),
    bad("float8_filter", f"{FILTER}=auto_filter_small_kn {EMULATED}", "one kind of GPU", "attention.wk"),
    bad("float8_filter", f"{FILTER}=layers {EMULATED}", "leaves no layer", "multiples of 16"),
    bad("float8_gathered", f"{GATHER} {ROWWISE} {EMULATED}", "recipe_name = rowwise has one per row"),
    bad(
        "float8_gathered",
        f"{GATHER} training.enable_cpu_offload {EMULATED}",
        "keeps them on the host",
        also="options_act",
    ),
    bad(
        "float8_gathered",
        f"{GATHER} parallelism.fsdp_reshard_after_forward=2 {EMULATED}",
        "fsdp_reshard_after_forward = 2",
        world=4,
    ),
    bad(
        "options_act",
        f"quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp {EMULATED}",
        f"{GATHER} = false",
    ),
    bad("float8_without_adapter", f"finetune.adapter=lora {EMULATED}", "weights in their own precision"),
]
