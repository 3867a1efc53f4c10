"""Rules for distillation. The teacher's config.json is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toolkit.config.local_paths import expand_user
from toolkit.errors import DataError, Problem
from toolkit.models.common.args import ModelArgs
from toolkit.models.on_disk import read_hf_config
from toolkit.preflight.planned_run import PlannedRun, rule
from toolkit.preflight.rules.experts import expert_parallel_divides, tensor_parallel_divides_experts
from toolkit.preflight.rules.pipeline import stages_not_empty
from toolkit.preflight.rules.tensor_context_parallel import ring_takes_sinks, tensor_parallel_divides

_PATH = "distillation.teacher_path"
_OF_MESH = (
    tensor_parallel_divides,
    ring_takes_sinks,
    expert_parallel_divides,
    tensor_parallel_divides_experts,
    stages_not_empty,
)
"""Rules of a mesh that depend on the model."""


@rule()
def teacher_can_teach(run: PlannedRun) -> list[Problem]:
    """Check that the teacher can be read, has the model's vocabulary, and fits the mesh."""
    options = run.config.distillation
    if not options.enable:
        return []
    if not options.teacher_path:
        return [run.problem(_PATH, "distillation needs a teacher", "name its Hugging Face folder")]
    try:
        teacher = read_hf_config(expand_user(options.teacher_path))
    except DataError as error:
        return [run.problem(_PATH, str(error), "name a Hugging Face folder with a config.json")]
    if run.model is None:
        return []
    if teacher.vocab_size != run.model.vocab_size:
        rule = f"its vocabulary of {teacher.vocab_size} tokens is not the model's of {run.model.vocab_size}"
        return [run.problem(_PATH, rule, "use a teacher with the same tokenizer", "model.vocab_size")]
    if options.top_k > teacher.vocab_size:
        rule, fix = "is more than the tokens of the vocabulary", f"set it to at most {teacher.vocab_size}"
        return [run.problem("distillation.top_k", rule, fix)]
    return [*_mesh_problems(run, teacher)]


def _mesh_problems(run: PlannedRun, teacher: ModelArgs) -> Iterator[Problem]:
    """Yield the problems that the mesh has with the teacher, but not with the model."""
    of_teacher = replace(run)
    of_teacher.__dict__["_model"] = teacher
    for check in _OF_MESH:
        if check(run):
            continue
        for problem in check(of_teacher):
            yield run.problem(_PATH, f"the teacher does not fit {problem.key}: {problem.rule}", problem.fix)


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
    return [
        run.problem(field.key, "a distilled model has its own loss", "remove it")
        for field in config.present_fields()
        if field.key.startswith("loss.") and config.value(field.key) != field.default
    ]
