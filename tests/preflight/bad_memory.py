"""Runs that break the rules of ``rules.memory``."""

from __future__ import annotations

from tests.preflight.bad_runs import V100, Bad, bad, write

BUDGET = "activation_checkpoint.mode=memory_budget"
COMPILE = "compile.enable compile.backend=aot_eager"


CASES: list[Bad] = [
    bad(
        "options_act",
        "activation_checkpoint.enable_activation_offloading activation_checkpoint.mode=full",
        "has no effect without a GPU",
        "remove it",
    ),
    bad(
        "options_act",
        "activation_checkpoint.enable_activation_offloading activation_checkpoint.mode=none",
        "has no effect",
        '"selective" or "full"',
        hardware=V100,
    ),
    bad("selective_checkpointing", "activation_checkpoint.selective_ac_option=0", "at least 1", '"op"'),
    bad(
        "selective_checkpointing",
        "activation_checkpoint.selective_ac_option=ops activation_checkpoint.mode=none",
        "at least 1",
        '"op"',
    ),
    bad(
        "checkpointing_debug",
        "activation_checkpoint.debug activation_checkpoint.selective_ac_option=op",
        'does not support it for selective_ac_option = "op"',
        'mode = "full"',
    ),
    bad(
        "checkpointing_debug",
        f"activation_checkpoint.debug activation_checkpoint.mode=full {COMPILE}",
        "compiled blocks",
        "compile.enable = false",
    ),
    bad(
        "options_act",
        "activation_checkpoint.memory_budget=0.3",
        'with activation_checkpoint.mode = "selective"',
        'mode = "memory_budget"',
    ),
    bad(
        "options_act",
        "activation_checkpoint.visualize_memory_budget_pareto activation_checkpoint.mode=full",
        'mode = "full"',
    ),
    bad(
        "options_act",
        "activation_checkpoint.early_stop activation_checkpoint.mode=none",
        'mode = "none"',
        'mode = "selective"',
    ),
    bad("memory_budget_needs", BUDGET, "compile.enable is false", "compile.enable = true"),
    bad(
        "memory_budget_needs",
        f"{BUDGET} {COMPILE} compile.components=loss",
        'compile.components lacks "model"',
    ),
    bad(
        "memory_budget_needs",
        f"{BUDGET} compile.enable compile.backend=eager",
        '"eager" does not choose',
        'compile.backend = "inductor"',
    ),
    bad("compiled_components", "compile.components=[] compile.enable", "nothing would be compiled"),
    bad(
        "compile_backend", "compile.backend=inducter compile.enable", "aot_eager", 'did you mean "inductor"?'
    ),
    bad("compile_backend", "compile.backend=inducter", "aot_eager", 'did you mean "inductor"?'),
    bad(
        "stage_modules_match_model",
        'parallelism.module_fqns_per_model_part=[["norms"]]',
        "the model has no norms",
    ),
    bad(
        "dropout_recomputed_identically",
        "activation_checkpoint.preserve_rng_state=false activation_checkpoint.mode=full "
        "finetune.adapter=lora finetune.lora.dropout=0.1",
        "would drop other elements",
    ),
    bad("compile_backend", "compile.backend=cudagraphs compile.enable", "need a CUDA device"),
    bad("compile_mode", "compile.mode=reduce-overhead compile.enable", "need a CUDA device", "remove it"),
    bad(
        "compile_mode",
        f"compile.mode=max-autotune-no-cudagraphs {COMPILE}",
        "compile.backend is aot_eager",
        'compile.backend = "inductor"',
    ),
    bad(
        "inductor_attends_in_fp64",
        "compile.backend=inductor compile.enable training.mixed_precision_param=float64",
        "from torch 2.13 on; this is 2.12",
        'compile.backend = "aot_eager"',
        torch=(2, 12),
    ),
    bad(
        "folders_writable",
        f"{COMPILE} compile.cache_folder=a/cache",
        "a is not a folder",
        key="compile.cache_folder",
        prepare=write("a", ""),
    ),
]
