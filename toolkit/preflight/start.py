"""The checkpoint or the weights that a run starts from, as the rules look at them."""

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
        """The run's own committed steps."""
        return committed_steps(self.checkpoints)

    @cached_property
    def loaded_by(self) -> str:
        """The key by which a checkpoint of ours is loaded: its own where there is one; "" where none is."""
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
        """The checkpoint is the run's own."""
        return self.loaded_by == "checkpoint.load_step"

    @cached_property
    def weights(self) -> Path | None:
        """The Hugging Face folder that the run starts from."""
        return None if self.loaded_by else weights_folder(self.config)

    @cached_property
    def loaded(self) -> Path:
        """The checkpoint that the run starts from, where ``loaded_by`` says that there is one."""
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
        """The manifest of ``loaded``."""
        return self._manifest if self.loaded_by and isinstance(self._manifest, dict) else None

    @property
    def manifest_error(self) -> str:
        return str(self._manifest) if self.loaded_by and not isinstance(self._manifest, dict) else ""

    @cached_property
    def excluded(self) -> list[str]:
        """The parts of the checkpoint that are not loaded."""
        asked: list[str] = [*self.config.checkpoint.exclude_from_loading]
        return parts_to_exclude(asked, self.manifest["run"]) if self.own and self.manifest else asked

    def anew(self, part: str) -> str:
        """Tell how to go on without a part of the checkpoint."""
        if part not in self.config.checkpoint.exclude_from_loading:
            return f'with checkpoint.exclude_from_loading = ["{part}"]'
        return (  # the run has left it out before
            f'in another job.dump_folder, with checkpoint.initial_load_path = "{self.loaded}" and '
            "checkpoint.initial_load_model_only = false"
        )

    @property
    def resumes(self) -> bool:
        """The run goes on from step, optimizer and data position, not from the weights alone."""
        return self.own or (bool(self.loaded_by) and not self.config.checkpoint.initial_load_model_only)
