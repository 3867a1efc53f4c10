"""Log to Weights & Biases: the metrics under TensorBoard's tags, and the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.metrics.tensorboard import tag

RUN_ID = "wandb_run_id"
"""File in the run folder with the W&B run ID, so that a resumed run continues the same W&B run."""


class WandB:
    """Logs metrics to a W&B run.

    As in torchtitan, WANDB_PROJECT (default "llama-toolkit"), WANDB_TEAM and WANDB_RUN_NAME select the run;
    wandb's own variables (WANDB_MODE, WANDB_API_KEY, …) apply too. A resumed run sends some steps again;
    wandb keeps the first values, which are equal. A failure is reported once through ``say`` and stops W&B
    logging, not the training. If every rank logs, each has its own run, with a name that ends in ``rank``, in
    one group: WANDB_RUN_GROUP, else the name or the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        rank: int | None = None,
    ):
        self._say, self._rank = say, rank
        self._run: Any = None
        self._attempt(lambda: self._start(folder, resume_step, config))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the numeric ``values`` of ``step``."""
        scalars = {tag(key): value for key, value in values.items() if isinstance(value, int | float)}
        self._attempt(lambda: self._run and self._run.log(scalars, step=step))

    def close(self) -> None:
        self._attempt(lambda: self._run and self._run.finish())

    def _start(self, folder: Path, resume_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        id_file, name, group_options = folder / RUN_ID, os.environ.get("WANDB_RUN_NAME"), {}
        if self._rank is not None:
            base = name or folder.absolute().name
            group = os.environ.get("WANDB_RUN_GROUP", base)
            group_options = {"group": group, "job_type": f"rank-{self._rank}"}
            name = f"{base}-rank-{self._rank}"
        if self._rank:
            id_file = folder / f"{RUN_ID}.rank-{self._rank}"
        run_id = id_file.read_text(encoding="utf-8").strip() if resume_step and id_file.exists() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "llama-toolkit"),
            entity=os.environ.get("WANDB_TEAM"),
            name=name,
            **group_options,
            dir=str(folder),
            config=dict(config),
            id=run_id,
            resume="allow" if run_id else None,
        )
        id_file.write_text(self._run.id, encoding="utf-8")

    def _attempt(self, send: Callable[[], Any]) -> None:
        try:
            send()
        except Exception as error:  # wandb raises errors of its server, service and the network
            self._run = None
            self._say(f"Weights & Biases: {error}; training continues without it")
