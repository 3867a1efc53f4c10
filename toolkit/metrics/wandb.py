"""Weights & Biases: the numbers of metrics.jsonl under TensorBoard's tags, and the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolkit.metrics.tensorboard import tag

RUN_ID = "wandb_run_id"
"""File of the run folder by which a resumed run goes on as the same run there."""


class WandB:
    """Sends what is logged to the run of ``folder``, named by torchtitan's variables.

    WANDB_PROJECT (default "llama-toolkit"), WANDB_TEAM and WANDB_RUN_NAME name it; wandb's own variables
    (WANDB_MODE, WANDB_API_KEY, …) hold as ever. A resumed run sends some steps again: wandb keeps
    the values that it has, which are the same. Whatever fails there is told once through ``say`` and
    ends the sending, not the training. Where every rank sends, each has a run of its own, whose name ends in
    ``rank``, in one group: WANDB_RUN_GROUP, or else the name or the folder.
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
        """Send the numbers among ``values`` of ``step``."""
        numbers = {tag(key): value for key, value in values.items() if isinstance(value, int | float)}
        self._attempt(lambda: self._run and self._run.log(numbers, step=step))

    def close(self) -> None:
        self._attempt(lambda: self._run and self._run.finish())

    def _start(self, folder: Path, resume_step: int, config: Mapping[str, Any]) -> None:
        import wandb

        kept, name, grouped = folder / RUN_ID, os.environ.get("WANDB_RUN_NAME"), {}
        if self._rank is not None:
            group = name or folder.absolute().name
            grouped = {"group": os.environ.get("WANDB_RUN_GROUP", group), "job_type": f"rank-{self._rank}"}
            name = f"{group}-rank-{self._rank}"
        if self._rank:
            kept = folder / f"{RUN_ID}.rank-{self._rank}"
        run_id = kept.read_text(encoding="utf-8").strip() if resume_step and kept.exists() else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "llama-toolkit"),
            entity=os.environ.get("WANDB_TEAM"),
            name=name,
            **grouped,
            dir=str(folder),
            config=dict(config),
            id=run_id,
            resume="allow" if run_id else None,
        )
        kept.write_text(self._run.id, encoding="utf-8")

    def _attempt(self, send: Callable[[], Any]) -> None:
        try:
            send()
        except Exception as error:  # wandb raises what its server, its service or the network raise
            self._run = None
            self._say(f"Weights & Biases: {error}; the training goes on without it")
