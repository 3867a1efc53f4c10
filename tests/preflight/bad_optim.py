"""Runs that break the rules of ``rules.schedule`` and ``rules.optim``."""

from __future__ import annotations

from tests.preflight.bad_runs import V100, Bad, bad, save

EARLY = "optimizer.early_step_in_backward"
HEAD = "optimizer.groups.head"
CASES: list[Bad] = [
    bad(
        "one_length",
        "training.epochs=2 training.steps=500",
        "training.steps = 500 (--training.steps) also sets the length of the run",
    ),
    bad(
        "one_warmup",
        "lr_scheduler.warmup_ratio=0.03 lr_scheduler.warmup_steps=10",
        "warmup_steps = 10 (--lr_scheduler.warmup_steps) also sets the warmup",
    ),
    bad("options_act", "lr_scheduler.gamma=0.9", 'decay_type = "linear"', 'decay_type = "step"'),
    bad("options_act", "lr_scheduler.step_size=9 lr_scheduler.decay_type=constant", '"constant"'),
    bad(
        "options_act",
        "lr_scheduler.decay_ratio=0.2 lr_scheduler.decay_type=step",
        "has no effect",
        '"linear" or "sqrt" or "cosine"',
    ),
    bad("options_act", "lr_scheduler.min_lr_factor=0.1 lr_scheduler.decay_type=constant", "has no effect"),
    bad(
        "total_steps_act",
        "lr_scheduler.total_steps=99 lr_scheduler.decay_type=constant",
        "has no effect",
        "warmup_ratio, or use a schedule",
    ),
    bad("learning_rate_above_zero", "lr_scheduler.total_steps=500", "training.steps is 10000"),
    bad("supported_options", "lr_scheduler.decay_type=expression", "register a function"),
    bad(
        "loss_options_apply",
        "loss.z_loss=0.1 finetune.classification.num_labels=2",
        "a classifier has its own loss",
        also="corpus_readable",
    ),
    bad(
        "learning_rate_above_zero",
        "lr_scheduler.total_steps=20000 training.epochs=2",
        "the run is 2 epochs long",
        "remove total_steps",
    ),
    bad(
        "no_decay_matches",
        "optimizer.no_decay=*norm.weight,*.bias,tok_embedding.weight",
        '"*.bias" matches no parameter',
        '"tok_embedding.weight" matches no parameter',
        "such as tok_embeddings.weight;",
    ),
    bad("no_decay_matches", "optimizer.no_decay=norm", "layers.0.attention_norm.weight, layers.0.ffn_norm"),
    bad(
        "groups_apply",
        "optimizer.groups.head.params=output.*,tok_embedding.weight optimizer.groups.head.lr=1e-4",
        '"tok_embedding.weight" matches no parameter',
        "such as tok_embeddings.weight;",
    ),
    bad("groups_apply", "optimizer.groups.head.lr=1e-4", "needs name patterns", key=f"{HEAD}.params"),
    bad("groups_apply", "optimizer.groups.head.params=output.*", "sets no option", "weight_decay or name"),
    bad(
        "groups_apply",
        f"optimizer.lr=0 {HEAD}.params=output.* {HEAD}.lr=1e-4",
        "optimizer.groups.head.lr is scheduled as a multiple of it",
    ),
    bad(
        "groups_apply",
        f"{HEAD}.params=output.* {HEAD}.lr=1e-4 finetune.frozen=output.*",
        "only parameters that are frozen or in groups before it",
    ),
    bad(
        "groups_apply",
        f"{HEAD}.params=output.* {HEAD}.lr=1e-4 optimizer.groups.all.params=* optimizer.groups.all.lr=1e-5"
        " optimizer.groups.again.params=output.* optimizer.groups.again.weight_decay=0",
        "in groups before it",
        key="optimizer.groups.again.params",
    ),
    bad(
        "groups_apply",
        f"{HEAD}.params=output.* {HEAD}.name=AdamW",
        "with optimizer.name = AdamW, AdamW or Adam updates these parameters anyway",
        key=f"{HEAD}.name",
    ),
    bad(
        "groups_apply",
        f"optimizer.name=Muon {HEAD}.params=output.*,*norm.weight {HEAD}.name=AdamW",
        "updates these parameters anyway",
        key=f"{HEAD}.name",
    ),
    bad(
        "some_matrices_are_trained",
        f"optimizer.name=Muon {HEAD}.params=layers.* {HEAD}.name=AdamW",
        "none is trained",
        "remove name from some of optimizer.groups",
    ),
    bad("average_is_used", "optimizer.ema_decay=0.999", "without checkpoints and validation"),
    bad(
        "average_is_used",
        "checkpoint.last_save_model_only optimizer.ema_decay=0.999 checkpoint.enable",
        "the last weights without their average",
        "set it to false",
    ),
    bad(
        "checkpoint_has_average",
        "optimizer.ema_decay=0.999 checkpoint.enable",
        "has no average of its weights",
        'exclude_from_loading = ["ema"]',
        prepare=lambda folder: save(folder, 4),
    ),
    bad(
        "checkpoint_has_this_optimizer_by_group",
        f"optimizer.name=Muon {HEAD}.params=*.wo.weight {HEAD}.name=AdamW checkpoint.enable",
        "has the state of another optimizer of layers.0.attention.wo.weight",
        "set each group's name as in that run",
        key=f"{HEAD}.name",
        prepare=lambda folder: save(folder, 4, config='[optimizer]\nname = "Muon"\n'),
    ),
    bad("options_act", "optimizer.loraplus_lr_ratio=16", 'finetune.adapter = "none"'),
    bad(
        "early_step_alone",
        f"training.max_norm=1 {EARLY}",
        "it cannot clip",
        "set training.max_norm = inf",
        world=2,
    ),
    bad(
        "early_step_alone",
        f"training.global_batch_size=32 training.max_norm=inf {EARLY}",
        "32 samples = 2 data-parallel × 8 local × 2 accumulated",
        "global_batch_size to 16, raise training.local_batch_size to 16",
        world=2,
    ),
    bad(
        "early_step_alone",
        f"training.enable_cpu_offload training.max_norm=inf {EARLY}",
        "would free none on the device",
        world=2,
        hardware=V100,
    ),
]
