"""Runs that break the rules of ``rules.finetune``."""

from __future__ import annotations

from tests.preflight.bad_runs import Bad, bad

LORA, PREFIX = "finetune.adapter=lora", "finetune.adapter=prefix_tuning"
CASES: list[Bad] = [
    bad("lora_has_targets", f"finetune.lora.target_modules=qproj {LORA}", "none of the linear", "q_proj"),
    bad("lora_rank_is_low", f"finetune.lora.rank=300 {LORA}", "is 256", "at most 256"),
    bad("blocks_are_there", "finetune.freeze_first_layers=7", "6 blocks", "at most 6"),
    bad(
        "blocks_are_there",
        "finetune.llama_adapter.adapter_layers=30 finetune.adapter=llama_adapter",
        "the model has 6 blocks",
    ),
    bad("patterns_match", "finetune.trainable=layer.*", '"layer.*" matches no parameter', "layers.0."),
    bad("patterns_match", "finetune.frozen=*", "leaves no parameter to train"),
    bad(
        "prefix_has_a_back_end",
        f"model.attention=flash data.document_mask=false {PREFIX}",
        "no prefix",
        also="attention_runs_on_device",
    ),
    bad(
        "prefix_has_a_back_end",
        f"parallelism.context_parallel_rotate_method=alltoall parallelism.context_parallel_degree=2 {PREFIX}",
        "a ring takes no prefix",
        world=2,
    ),
    bad("exports_have_a_model", f"checkpoint.last_save_in_hf checkpoint.enable {LORA}", "holds no model"),
]
