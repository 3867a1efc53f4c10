"""The checkpoint or weights that a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import committed_steps, parts_to_exclude, read_manifest, step_folder
from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.errors import CheckpointError
from toolkit.models.from_config import weights_folder


@dataclass(frozen=True)
class Start:
    """The start of a run whose own checkpoints are in the folder ``checkpoints``."""

    config: Config
    checkpoints: Path

    @cached_property
    def steps(self) -> list[int]:
        """Committed steps of the run itself."""
        return committed_steps(self.checkpoints)

    @cached_property
    def loaded_by(self) -> str:
        """The key that selects the checkpoint to load, preferring the run's own; "" if none is loaded."""
        options = self.config.checkpoint
        if not options.enable:
            return ""
        if options.load_step != -1 or self.steps:
            return "checkpoint.load_step"
        if options.initial_load_path is None or options.initial_load_in_hf:
            return ""
        return "checkpoint.initial_load_path"

    @property
    def own(self) -> bool:
        """True if the checkpoint is the run's own."""
        return self.loaded_by == "checkpoint.load_step"

    @cached_property
    def weights(self) -> Path | None:
        """Hugging Face folder from which the run starts."""
        return None if self.loaded_by else weights_folder(self.config)

    @cached_property
    def loaded(self) -> Path:
        """Checkpoint from which the run starts; valid only if ``loaded_by`` is set."""
        options = self.config.checkpoint
        if self.loaded_by == "checkpoint.initial_load_path":
            return expand_user(options.initial_load_path or "")
        step = max(self.steps) if options.load_step == -1 else options.load_step
        return step_folder(self.checkpoints, step)

    @cached_property
    def _manifest(self) -> dict[str, Any] | CheckpointError:
        try:
            return read_manifest(self.loaded)
        except CheckpointError as error:
            return error

    @property
    def manifest(self) -> dict[str, Any] | None:
        """Manifest of ``loaded``."""
        return self._manifest if self.loaded_by and isinstance(self._manifest, dict) else None

    @property
    def manifest_error(self) -> str:
        return str(self._manifest) if self.loaded_by and not isinstance(self._manifest, dict) else ""

    @cached_property
    def excluded(self) -> list[str]:
        """Components of the checkpoint that are not loaded."""
        asked: list[str] = [*self.config.checkpoint.exclude_from_loading]
        return parts_to_exclude(asked, self.manifest["run"]) if self.own and self.manifest else asked

    @property
    def step(self) -> int:
        """Number of finished steps that the run starts with."""
        counted = self.manifest and self.resumes and "train_state" not in self.excluded
        return self.manifest["step"] if self.manifest and counted else 0

    @property
    def resumes_data(self) -> bool:
        """True if the run resumes the position in the data, and in the phase that counted it."""
        if self.manifest is None or not self.resumes or "dataloader" in self.excluded or self.config.phases:
            return False
        phase = (self.manifest["run"].get("loader") or {}).get("phase", "")
        return self.config.phase in (None, phase)

    def anew(self, part: str) -> str:
        """Describe how to continue without loading a component of the checkpoint."""
        if part not in self.config.checkpoint.exclude_from_loading:
            return f'with checkpoint.exclude_from_loading = ["{part}"]'
        return (  # the run has already excluded it once
            f'in another job.dump_folder, with checkpoint.initial_load_path = "{self.loaded}" and '
            "checkpoint.initial_load_model_only = false"
        )

    @property
    def resumes(self) -> bool:
        """True if the run resumes step, optimizer and data position, not just the weights."""
        return self.own or (bool(self.loaded_by) and not self.config.checkpoint.initial_load_model_only)
