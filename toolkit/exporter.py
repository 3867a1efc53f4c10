"""Export the checkpoints of a run as Hugging Face or PEFT folders."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.checkpoint.manager import CheckpointManager
from toolkit.checkpoint.manifest import committed_steps, read_manifest, step_folder
from toolkit.config import Config
from toolkit.data.build import tokenizer_path
from toolkit.errors import CheckpointError, DataError
from toolkit.models.on_disk import EXPORTS

if TYPE_CHECKING:
    from toolkit.storage.remote_path import RemotePath

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Exporter:
    """Exports the checkpoints of ``manager`` as Hugging Face or PEFT folders in ``folder``.

    All ranks call every method except :meth:`due`. ``say`` reports a line to the user.
    """

    def __init__(
        self, config: Config, folder: Path, manager: CheckpointManager, *, say: Callable[[str], None]
    ):
        self.folder = folder
        self._config = config
        self._options = config.checkpoint
        self._manager = manager
        self._say = say

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self._options.export_dtype]

    def due(self, step: int, *, last: bool) -> bool:
        every = self._options.hf_export_interval
        return (last and self._options.last_save_in_hf) or (every is not None and step % every == 0)

    def export(self, step: int, *, final: bool) -> None:
        """Export the committed checkpoint of ``step`` and report a failure. The ``final`` export is also
        uploaded to the Hub.

        Raises:
            CheckpointError, DataError: the ``final`` export failed.
        """
        out, remote = self._folder_of(step), self._remote_folder(step)
        try:
            if remote:
                self._withdraw(remote)
            written = self._write(step, out)
        except (CheckpointError, DataError) as error:
            if final:
                raise
            self._say(f"NOT EXPORTED: {error}\n  Training continues.")
        else:
            self._say(f"wrote {written}: {out}")
            if remote:
                self._upload(out, remote, final=final)
            if final and self._options.push_to_hub:
                self._push(out, self._options.push_to_hub)

    def export_missed(self, step: int, *, last: bool) -> None:
        """Repeat failed uploads, and exports that were lost because the run was killed after the save. The
        upload to the Hub is always repeated; it skips files that are already there.

        Raises:
                CheckpointError, DataError: as in :meth:`export`.
        """
        from toolkit.weights.remote_folder import is_complete

        ranks, out, remote = self._manager.ranks, self._folder_of(step), self._remote_folder(step)
        if not self.due(step, last=last) or not ranks.on_rank_0(
            lambda: step in committed_steps(self._manager.folder)
        ):
            return
        if not ranks.on_rank_0(lambda: self._is_written(step)):
            self.export(step, final=last)
            return
        if remote and not ranks.on_rank_0(lambda: is_complete(remote)):
            self._upload(out, remote, final=last)
        if last and self._options.push_to_hub:
            self._push(out, self._options.push_to_hub)

    def _is_written(self, step: int) -> bool:
        """Report whether the folder of ``step`` exists and is newer than its checkpoint."""
        out, saved = self._folder_of(step), step_folder(self._manager.folder, step)
        saved_at = datetime.fromisoformat(read_manifest(saved)["saved_at"])
        return out.is_dir() and out.stat().st_mtime >= saved_at.timestamp()

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _remote_folder(self, step: int) -> RemotePath | None:
        """Return the folder next to the checkpoints in object storage; None if they are local."""
        folder = self._manager.folder
        return None if isinstance(folder, Path) else folder / EXPORTS / f"step-{step}"

    def _write(self, step: int, out: Path) -> str:
        """Write the folder and return a description of its content."""
        options, saved = self._config.finetune, step_folder(self._manager.folder, step)
        arguments: dict[str, Any] = {
            "dtype": self.dtype, "tokenizer_path": tokenizer_path(self._config), "ranks": self._manager.ranks
        }  # fmt: skip
        max_bytes = self._options.export_max_bytes
        if not options.adds:
            from toolkit.weights.export import export_hf

            export_hf(saved, out, max_bytes=max_bytes, **arguments)
            return f"the model of step {step} as a Hugging Face folder"
        from toolkit.finetune.export import export_merged, export_peft

        if options.merge_on_export:
            export_merged(saved, out, max_bytes=max_bytes, **arguments)
            return f"the model of step {step}, with its adapter merged, as a Hugging Face folder"
        export_peft(saved, out, **arguments)
        return f"the adapter of step {step} as a PEFT folder"

    def _withdraw(self, out: RemotePath) -> None:
        """Mark the remote folder as incomplete: it may exist from an earlier save of the same step."""
        from toolkit.weights.remote_folder import withdraw

        self._manager.ranks.on_rank_0(lambda: withdraw(out))

    def _upload(self, folder: Path, out: RemotePath, *, final: bool) -> None:
        """Upload the folder next to the checkpoints and report a failure.

        Raises:
            CheckpointError: the upload of the ``final`` folder failed.
        """
        from toolkit.weights.remote_folder import upload_folder

        try:
            self._manager.ranks.on_rank_0(lambda: upload_folder(folder, out, replace=True))
        except DataError as error:
            if final:
                again = f"{folder} is complete: the same command uploads it again."
                raise CheckpointError(f"NOT UPLOADED: {error}\n  {again}") from None
            self._say(f"NOT UPLOADED: {error}\n  The folder stays on this machine.")
        else:
            self._say(f"uploaded it to {out}")

    def _push(self, folder: Path, repository: str) -> None:
        from toolkit.weights.hub_upload import push_folder

        address = self._manager.ranks.on_rank_0(lambda: push_folder(folder, repository))
        self._say(f"uploaded it to {address}")
