"""The teacher of a distilled model: its architecture, and the configuration of its forwards. Imports no
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.config import Config
from toolkit.config.parallelism import ActivationCheckpoint
from toolkit.models.common.args import ModelArgs
from toolkit.models.on_disk import hugging_face_folder, read_hf_config

_OF_STUDENT = ("debug", "distillation", "finetune", "loss", "moe", "validation")
"""Tables that do not apply to a teacher."""


def teacher_folder(config: Config) -> Path:
    """Return the teacher's Hugging Face folder; for a checkpoint, the export of its step."""
    return hugging_face_folder(config.distillation.teacher_path)


def teacher_args(config: Config) -> ModelArgs:
    """Return the teacher's model args.

    Raises:
        DataError: its config.json is missing, or describes an unknown model.
    """
    return read_hf_config(teacher_folder(config))


def teacher_config(config: Config) -> Config:
    """Return ``config`` for the teacher. It is resharded after each of its forwards, has no checkpointed
    blocks, and its blocks are divided evenly over the stages of a pipeline."""
    changes: dict[str, Any] = {name: type(getattr(config, name))() for name in _OF_STUDENT}
    changes["activation_checkpoint"] = ActivationCheckpoint(mode="none")
    changes["parallelism"] = config.parallelism.model_copy(
        update={
            "fsdp_reshard_after_forward": "always",
            "module_fqns_per_model_part": None,
            "pipeline_parallel_layers_per_stage": None,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        }
    )
    return config.model_copy(update=changes)
