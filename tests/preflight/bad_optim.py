"""Runs that break the rules of ``rules.schedule`` and ``rules.optim``."""

from __future__ import annotations

from tests.preflight.bad_runs import V100, Bad, bad

EARLY = "optimizer.early_step_in_backward"
CASES: list[Bad] = [
    bad(
        "one_length",
        "training.epochs=2 training.steps=500",
        "training.steps = 500 (--training.steps) gives the length of the run, too",
    ),
    bad(
        "one_warmup",
        "lr_scheduler.warmup_ratio=0.03 lr_scheduler.warmup_steps=10",
        "warmup_steps = 10 (--lr_scheduler.warmup_steps) gives the warm-up, too",
    ),
    bad("options_act", "lr_scheduler.gamma=0.9", 'decay_type = "linear"', 'decay_type = "step"'),
    bad("options_act", "lr_scheduler.step_size=9 lr_scheduler.decay_type=constant", '"constant"'),
    bad(
        "options_act",
        "lr_scheduler.decay_ratio=0.2 lr_scheduler.decay_type=step",
        "does nothing",
        '"linear" or "sqrt" or "cosine"',
    ),
    bad("options_act", "lr_scheduler.min_lr_factor=0.1 lr_scheduler.decay_type=constant", "does nothing"),
    bad(
        "total_steps_act",
        "lr_scheduler.total_steps=99 lr_scheduler.decay_type=constant",
        "does nothing",
        "warmup_ratio, or a shape",
    ),
    bad("learning_rate_above_zero", "lr_scheduler.total_steps=500", "training.steps is 10000"),
    bad("options_act", "lr_scheduler.expression=1/step", 'decay_type = "linear"', '"expression"'),
    bad("schedule_has_values", "lr_scheduler.decay_type=expression", "lr_scheduler.expression says nothing"),
    *[
        bad(
            "schedule_has_values",
            f"lr_scheduler.decay_type=expression lr_scheduler.expression={text} training.steps=100",
            said,
            key="lr_scheduler.expression",
        )
        for text, said in {
            "1/(step-3)": "at step 1 of 100 the rate would be -0.5 of the peak",
            "1/(step-7)**2": "at step 7 of 100: it has no value: ",
            "exp(step*99)": "at step 8 of 100: it has no value: math range error",
            "sqrt(50-step)": "at step 51 of 100: it has no value: ",
            "1-step/total_steps lr_scheduler.total_steps=60": "at step 61 of 100 the rate would be -0.0",
            "setp": "setp is unknown; there are step, total_steps",
            "open('x')": "open is unknown",
            "step.real": "Attribute is not evaluated",
            "1+": "it is no expression: invalid syntax",
            "2**9**9**9": "it has no value: ",
        }.items()
    ],
    bad(
        "schedule_has_values",
        "lr_scheduler.decay_type=expression lr_scheduler.expression=step/4-1 training.epochs=2",
        "at step 1 the rate would be -0.75 of the peak",
        key="lr_scheduler.expression",
    ),
    bad(
        "loss_of_tokens",
        "loss.z_loss=0.1 finetune.classification.num_labels=2",
        "the loss of classes is another",
        also="corpus_readable",
    ),
    bad(
        "learning_rate_above_zero",
        "lr_scheduler.total_steps=20000 training.epochs=2",
        "the run is 2 epochs long",
        "leave total_steps out",
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
        "set it to 16, raise training.local_batch_size to 16",
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
