"""Runs that break the rules of ``rules.distillation``."""

from __future__ import annotations

from pathlib import Path

from tests.mesh_runs import write_teacher
from tests.preflight.bad_runs import Bad, bad

_ON = "distillation.enable"
_TEACHER = f"distillation.teacher_path=teacher {_ON}"


def _fits(folder: Path) -> None:
    write_teacher(folder / "teacher", vocab=4352)


def _other_vocabulary(folder: Path) -> None:
    write_teacher(folder / "teacher")


CASES: list[Bad] = [
    bad("teacher_can_teach", _ON, "needs a teacher", "Hugging Face folder", key="distillation.teacher_path"),
    bad("teacher_can_teach", _TEACHER, "teacher/config.json", "name a Hugging Face folder"),
    bad(
        "teacher_can_teach",
        _TEACHER,
        "its vocabulary of 516 tokens is not the model's of 4352",
        prepare=_other_vocabulary,
    ),
    bad(
        "teacher_can_teach",
        f"distillation.top_k=5000 {_TEACHER}",
        "more than the tokens of the vocabulary",
        "set it to at most 4352",
        prepare=_fits,
    ),
    bad(
        "teacher_can_teach",
        f"{_TEACHER} parallelism.tensor_parallel_degree=4",
        "the teacher does not fit parallelism.tensor_parallel_degree: must divide n_kv_heads, which is 2",
        world=4,
        prepare=_fits,
    ),
    bad(
        "distillation_is_the_loss",
        f"{_ON} distillation.teacher_path=teacher finetune.classification.num_labels=3",
        "needs an objective that predicts tokens",
        prepare=_fits,
        also="corpus_readable",
    ),
    bad(
        "distillation_is_the_loss",
        f"loss.z_loss=1e-4 {_TEACHER}",
        "a distilled model has its own loss",
        "remove it",
        prepare=_fits,
    ),
    bad(
        "options_act",
        "distillation.temperature=2",
        "with distillation.enable = false",
    ),
]
