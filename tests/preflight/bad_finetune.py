"""Runs that break the rules of ``rules.finetune``."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.preflight.bad_runs import Bad, bad, save, write
from tests.preflight.bad_weights import FROM_M, write_model


def _peft(folder: Path, *, r: int, rank: int | None = None) -> None:
    """A LoRA of one layer."""
    from safetensors.torch import save_file

    rank, at = rank or r, folder / "peft"
    at.mkdir()
    config = {"peft_type": "LORA", "r": r, "lora_alpha": 16}
    (at / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.zeros(rank, 256),
        f"{name}.lora_B.weight": torch.zeros(256, rank),
    }
    save_file(tensors, at / "adapter_model.safetensors")


LORA, PREFIX = "finetune.adapter=lora", "finetune.adapter=prefix_tuning"
EXPORT = "checkpoint.last_save_in_hf checkpoint.enable"
FILE = "training.dataset_path=a.jsonl data.chat_template=llama3"
PAIRS = f"training.format=preference {FILE}"
DPO = f"finetune.objective=dpo {LORA}"
_PAIR = write("a.jsonl", json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
_LABELED = write("a.jsonl", json.dumps({"prompt": "a", "completion": "b", "label": True}))
CASES: list[Bad] = [
    bad(
        "noise_has_lengths",
        "finetune.neftune_noise_alpha=5 data.packing=false data.document_mask=false",
        "which padded rows without data.document_mask do not tell",
        "data.document_mask = true",
    ),
    bad("lora_has_targets", f"finetune.lora.target_modules=qproj {LORA}", "is not a linear layer", "q_proj"),
    bad(
        "lora_has_targets", f"finetune.lora.target_modules=experts {LORA}", '"experts" is not a linear layer'
    ),
    *(
        bad(
            "lora_has_targets",
            f"finetune.lora.target_modules={target} {LORA} model.name={name}",
            f'"{target}" is not a linear layer, and LoRA adapts no routers of this model',
            fix,
        )
        for name, target, fix in (
            ("gpt_oss", "router", "use some of tok_embeddings, wq, wk, wv, wo, w1, w2, w3, output"),
            ("llama4", "gate", "did you mean gate_proj?"),  # of dense blocks and shared experts
        )
    ),
    bad(
        "dora_has_linear_layers",
        f"finetune.lora.use_dora finetune.lora.target_modules=all-linear {LORA} model.name=qwen3_moe",
        "have no magnitudes, and finetune.lora.target_modules has layers.0.moe.experts.w1",
        "set it to false",
    ),
    bad(
        "dora_has_linear_layers",
        f"finetune.lora.use_dora finetune.lora.target_modules=wq,lm_head {LORA}",
        "embedding and head have no magnitudes, and finetune.lora.target_modules has output",
    ),
    bad(
        "lora_rank_is_low",
        f"finetune.lora.rank=13 finetune.lora.target_modules=experts {LORA} model.name=experts",
        "the smallest dimension of layers.1.moe.experts.w1 is 12",
    ),
    bad("lora_has_targets", f"finetune.lora.target_modules=attention_norm {LORA}", "is not a linear layer"),
    *(
        bad(
            "lora_has_targets",
            f"finetune.lora.target_modules=wq,{target} {LORA} model.tie_embeddings=true",
            f'"{target}" is the {what}, and LoRA would update one of the tied embedding and head',
            'trainable = ["tok_embeddings.weight"] trains it fully, embedding and head as one',
        )
        for target, what in (
            ("lm_head", "output head"),
            ("output", "output head"),
            ("*.embed_tokens", "embedding"),
            ("tok_embeddings", "embedding"),
        )
    ),
    *(
        bad("token_rows_exist", f"finetune.trainable_token_indices={indices} {LORA}{others}", *says)
        for indices, others, *says in (
            ("3,4352", "", "4352 is not a token of a vocabulary of 4352", "from 0 to 4351"),
            ("3,5,3", "", "3 is listed twice", "list each token once"),
            ("3", " finetune.trainable=tok_embeddings.*", "selects tok_embeddings.weight", "that pattern"),
            ("3", " finetune.lora.target_modules=tok_embeddings", "adapts the whole embedding", "of the two"),
        )
    ),
    bad(
        "token_rows_exist",
        f"parallelism.pipeline_parallel_degree=2 finetune.trainable_token_indices=3 {LORA} "
        "model.tie_embeddings=true",
        "the last pipeline stage has a copy of the tied embedding",
        "set it to 1",
        world=2,
    ),
    bad("lora_rank_is_low", f"finetune.lora.rank=300 {LORA}", "is 256", "at most 256"),
    bad("enough_blocks", "finetune.freeze_first_layers=7", "6 blocks", "at most 6"),
    bad(
        "enough_blocks",
        "finetune.llama_adapter.adapter_layers=30 finetune.adapter=llama_adapter",
        "the model has 6 blocks",
    ),
    bad(
        "freezing_acts",
        f"finetune.freeze_first_layers=2 {LORA}",
        "has no effect with an adapter",
        "finetune.lora.target_modules",
    ),
    bad("freezing_acts", f"finetune.frozen=layers.0.* {PREFIX}", "has no effect with", "remove it"),
    bad("patterns_match", "finetune.trainable=layer.*", '"layer.*" matches no parameter', "layers.0."),
    bad("patterns_match", "finetune.frozen=*", "leaves no parameter to train"),
    *(
        bad("adapter_fits_attention", f"{adapter} model.name={name}", says, 'set it to "lora"')
        for adapter in ("finetune.adapter=prefix_tuning", "finetune.adapter=llama_adapter")
        for name, says in (
            ("deepseek_v2", "one vector"),
            ("gpt_oss", "sinks are part of the softmax"),
            ("llama4", "learned keys have no position"),
        )
    ),
    bad(
        "prefix_has_a_backend",
        f"model.attention=flash data.document_mask=false {PREFIX}",
        "do not support a prefix",
        also="attention_runs_on_device",
    ),
    bad(
        "prefix_has_a_backend",
        f"parallelism.context_parallel_rotate_method=alltoall parallelism.context_parallel_degree=2 {PREFIX}",
        "ring attention does not support a prefix",
        world=2,
    ),
    bad(
        "adapter_exportable",
        "checkpoint.last_save_in_hf checkpoint.enable finetune.adapter=llama_adapter "
        "finetune.llama_adapter.adapter_layers=2",
        'finetune.llama_adapter.gate = "head"',
        'remove it, or set finetune.llama_adapter.gate = "layer"',
    ),
    bad(
        "adapter_exportable",
        f"checkpoint.hf_export_interval=500 checkpoint.enable {PREFIX} finetune.trainable=norm.weight",
        "finetune.trainable",
    ),
    bad(
        "adapter_exportable",
        f"{EXPORT} {FROM_M} {LORA} finetune.trainable=layers.1.attention.wv.weight",
        "such as layers.1.attention.wv",
        "or set finetune.merge_on_export = true",
        prepare=write_model,
    ),
    bad("adapter_exportable", f"finetune.merge_on_export {LORA}", "nothing is exported"),
    bad("adapter_exportable", f"finetune.merge_on_export {EXPORT} {LORA}", "initialized from debug.seed"),
    bad("adapter_exportable", f"finetune.merge_on_export {EXPORT} {PREFIX}", "only LoRA can be merged"),
    bad("adapter_path_fits", f"finetune.adapter_path=no/step-3 {LORA}", "checkpoint.enable, which is false"),
    bad("adapter_path_fits", f"finetune.adapter_path=no/step-3 checkpoint.enable {LORA}", "no such folder"),
    bad(
        "adapter_path_fits",
        f"finetune.adapter_path=m checkpoint.enable {LORA}",
        "m is a checkpoint of a run without adapter\n  fix:  use a PEFT folder",
        prepare=lambda folder: save(folder, 5).rename(folder / "m"),
    ),
    bad(
        "adapter_path_fits",
        f"finetune.adapter_path=peft checkpoint.enable {LORA}",
        "r = 0: must be a positive integer",
        "docs/fine_tuning.md",
        prepare=lambda folder: _peft(folder, r=0, rank=2),
    ),
    bad(
        "adapter_path_fits",
        f"finetune.adapter_path=peft checkpoint.enable {LORA} finetune.lora.rank=4",
        "finetune.lora.rank = 2",
        "set finetune.lora.rank to that",
        prepare=lambda folder: _peft(folder, r=2),
    ),
    bad(
        "adapter_path_fits",
        f"finetune.adapter_path=peft checkpoint.enable {PREFIX}",
        "finetune.adapter = 'lora'",
        prepare=lambda folder: _peft(folder, r=2),
    ),
    bad(
        "adapter_path_fits",
        f"finetune.adapter_path=peft checkpoint.enable {LORA}",
        "layers.0.self_attn.q_proj.lora_A.weight (2, 256) instead of (8, 256)",
        prepare=lambda folder: _peft(folder, r=8, rank=2),
    ),
    bad(
        "adapter_path_fits",
        f"finetune.adapter_path=peft checkpoint.enable {LORA} finetune.lora.rank=2",
        "finetune.lora.target_modules = ['layers.0.attention.wq']",
        prepare=lambda folder: _peft(folder, r=2),
    ),
    bad(
        "pairs_are_read",
        "finetune.objective=orpo finetune.classification.num_labels=2 training.dataset_path=a.jsonl",
        "a classifier generates no answers",
        prepare=write("a.jsonl", json.dumps({"text": "a", "label": 1})),
    ),
    bad(
        "options_act",
        f"finetune.dpo.label_smoothing=0.1 finetune.dpo.loss_type=ipo {DPO} {PAIRS}",
        'has no effect with finetune.dpo.loss_type = "ipo"',
        prepare=_PAIR,
    ),
    bad("pairs_are_read", DPO, "rows with two answers", "set data.format to"),
    bad(
        "pairs_are_read",
        f"data.document_mask=false finetune.objective=simpo {PAIRS}",
        "must not attend",
        prepare=_PAIR,
    ),
    bad("pairs_are_read", f"data.train_on=all {DPO} {PAIRS}", "their common prompt", prepare=_PAIR),
    bad(
        "pairs_are_read",
        f"training.format=unpaired_preference {DPO} {FILE}",
        "rows with two answers",
        prepare=_LABELED,
    ),
    bad(
        "pairs_are_read", f"finetune.objective=kto {LORA}", 'one answer and its label ("unpaired_preference")'
    ),
    bad(
        "pairs_are_read",
        "finetune.objective=reward finetune.classification.num_labels=2 training.dataset_path=a.jsonl",
        "one score instead of classes",
        prepare=write("a.jsonl", json.dumps({"text": "a", "label": 1})),
    ),
    bad(
        "pairs_are_read",
        f"data.train_on=last_assistant finetune.objective=reward {PAIRS}",
        "scores whole conversations",
        prepare=_PAIR,
    ),
    bad(
        "classifier_has_no_vocabulary_head",
        f"model.tie_embeddings=true finetune.objective=reward {PAIRS}",
        "a classifier or reward model has no head to tie",
        prepare=_PAIR,
    ),
    bad(
        "classifier_has_a_class",
        f"finetune.objective=reward model.name=llama4 {PAIRS}",
        "transformers has no",
        "use another model",
        prepare=_PAIR,
    ),
    bad(
        "columns_known",
        f"data.columns=margin=gap finetune.objective=simpo {PAIRS}",
        "only reward models use margins",
        prepare=write("a.jsonl", json.dumps({"prompt": "a", "chosen": "b", "rejected": "c", "gap": 1})),
    ),
    bad(
        "pairs_are_compared",
        f"training.format=unpaired_preference {FILE}",
        "may contain undesirable answers",
        '"kto"',
        prepare=_LABELED,
    ),
    bad(
        "pairs_are_compared",
        f"finetune.objective=sft {PAIRS}",
        "both would be trained on",
        '"dpo"',
        prepare=_PAIR,
    ),
]
