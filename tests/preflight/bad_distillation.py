"""Runs that break the rules of ``rules.distillation``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.mesh_runs import write_teacher
from tests.preflight.bad_runs import Bad, bad

_ON = "distillation.enable"
_TEACHER = f"distillation.teacher_path=teacher {_ON}"


def _fits(folder: Path) -> None:
    write_teacher(folder / "teacher", vocab=4352)


def _other_vocabulary(folder: Path) -> None:
    write_teacher(folder / "teacher")


def _change(folder: Path, **values: object) -> None:
    _fits(folder)
    config = folder / "teacher/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


CASES: list[Bad] = [
    bad("teacher_can_teach", _ON, "needs a teacher", "Hugging Face folder", key="distillation.teacher_path"),
    bad("teacher_can_teach", _TEACHER, "there is no folder teacher", "use a folder with config.json"),
    bad(
        "teacher_can_teach",
        _TEACHER,
        "model.safetensors",
        "use a folder with complete safetensors files",
        prepare=lambda folder: (_fits(folder), (folder / "teacher/model.safetensors").unlink()),
    ),
    bad(
        "teacher_can_teach",
        f"{_TEACHER} training.seq_len=128",
        "the teacher does not fit training.seq_len: the teacher supports at most 64 tokens",
        "use another teacher, or change training.seq_len",
        prepare=lambda folder: _change(folder, max_position_embeddings=64),
    ),
    bad(
        "teacher_can_teach",
        _TEACHER,
        "it is a classifier",
        prepare=lambda folder: write_teacher(folder / "teacher", vocab=4352, labels=("a", "b")),
    ),
    bad(
        "teacher_can_teach",
        f"distillation.top_k=1 distillation.divergence=reverse_kl {_TEACHER}",
        "must be 2 to 4352, the size of the vocabulary: probabilities normalized over one token are 1",
        prepare=_fits,
    ),
    bad(
        "teacher_can_teach",
        _TEACHER,
        "its vocabulary of 516 tokens is not the model's of 4352",
        prepare=_other_vocabulary,
    ),
    bad(
        "teacher_can_teach",
        f"distillation.top_k=5000 {_TEACHER}",
        "must be 1 to 4352, the size of the vocabulary",
        "set it to 64",
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
        f"{_ON} distillation.teacher_path=teacher finetune.objective=dpo",
        "needs an objective that predicts tokens",
        prepare=_fits,
        also="pairs_are_read",
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
