"""Rules for distillation. The teacher's config.json and the headers of its files are read."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.models.common.args import ModelArgs
from toolkit.models.teacher import teacher_args, teacher_config, teacher_folder
from toolkit.preflight.planned_run import PlannedRun, rule
from toolkit.preflight.rules.attention import (
    attention_takes_head_dim,
    attention_takes_sinks,
    attention_takes_window,
)
from toolkit.preflight.rules.experts import expert_parallel_divides, tensor_parallel_divides_experts
from toolkit.preflight.rules.finetune import loss_options
from toolkit.preflight.rules.model import sequence_fits_model
from toolkit.preflight.rules.pipeline import stages_not_empty
from toolkit.preflight.rules.tensor_context_parallel import (
    ring_has_a_kernel,
    ring_takes_sinks,
    tensor_parallel_divides,
)
from toolkit.preflight.rules.weights import unusable_weights

_PATH = "distillation.teacher_path"
_OF_MODEL = (
    sequence_fits_model,
    attention_takes_head_dim,
    attention_takes_sinks,
    attention_takes_window,
    tensor_parallel_divides,
    ring_has_a_kernel,
    ring_takes_sinks,
    expert_parallel_divides,
    tensor_parallel_divides_experts,
    stages_not_empty,
)
"""Rules that depend on the model."""


@rule()
def teacher_can_teach(run: PlannedRun) -> list[Problem]:
    """Check that the teacher can be read, has the model's vocabulary, and runs like the model."""
    options = run.config.distillation
    if not options.enable:
        return []
    if not options.teacher_path:
        return [run.problem(_PATH, "distillation needs a teacher", "name its Hugging Face folder")]
    if wrong := unusable_weights(teacher_folder(run.config), options.teacher_path):
        return [run.problem(_PATH, *wrong)]
    teacher = teacher_args(run.config)
    if teacher.classifier is not None:
        return [run.problem(_PATH, "it is a classifier, which predicts no tokens", "use a language model")]
    if run.model is None:
        return []
    if teacher.vocab_size != run.model.vocab_size:
        rule = f"its vocabulary of {teacher.vocab_size} tokens is not the model's of {run.model.vocab_size}"
        return [run.problem(_PATH, rule, "use a teacher with the same tokenizer", "model.vocab_size")]
    least = 2 if options.divergence == "reverse_kl" else 1
    if not least <= options.top_k <= teacher.vocab_size:
        rule = f"must be {least} to {teacher.vocab_size}, the size of the vocabulary"
        if options.top_k < least:
            rule += ": probabilities normalized over one token are 1"
        return [run.problem("distillation.top_k", rule, "set it to 64", "distillation.divergence")]
    return [*_problems_of(teacher, run)]


def _problems_of(teacher: ModelArgs, run: PlannedRun) -> Iterator[Problem]:
    """Yield the problems that the teacher has on the mesh and device of the run, but the model has not."""
    of_teacher = run.with_model(teacher_config(run.config), teacher, "the teacher")
    for check in _OF_MODEL:
        for problem in [] if check(run) else check(of_teacher):
            rule = f"the teacher does not fit {problem.key}: {problem.rule}"
            yield run.problem(_PATH, rule, f"use another teacher, or change {problem.key}")


@rule()
def distillation_is_the_loss(run: PlannedRun) -> list[Problem]:
    """Check that no other option replaces the loss, or the head, of a distilled model."""
    config, key = run.config, "distillation.enable"
    if not config.distillation.enable:
        return []
    if config.finetune.classes or config.finetune.compares:
        return [run.problem(key, "distillation needs an objective that predicts tokens", "remove it")]
    if config.model.converters:
        return [run.problem(key, "converters would convert the teacher too", "remove model.converters")]
    return loss_options(run, "a distilled model")
