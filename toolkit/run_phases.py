"""Train the phases of a run (``[phases.NAME]``) one after another, each with its own :class:`Trainer`.

At the end of a phase the run saves a checkpoint, and the next trainer resumes from it, as another process
would: with its own model and loader, and the same step, optimizer state, schedule and log. Therefore a run
that is interrupted in a phase, or between two, resumes exactly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.config.phases import phase_after
from toolkit.distributed.agreement import Ranks
from toolkit.preflight.start import Start
from toolkit.trainer import Shared, Trainer


def train_in_phases(config: Config, build: Callable[..., Trainer]) -> tuple[int, Trainer]:
    """Train to the last step, or until the run is stopped; return the exit code and the last trainer, with
    the history of all phases.

    ``build`` is :class:`Trainer` with its other arguments; it is called with a phase, if there are any.
    """
    if not config.phases:
        trainer = build()
        return trainer.train(), trainer
    folder = expand_user(config.checkpoint.folder, inside=expand_user(config.job.dump_folder))
    step = Ranks().on_rank_0(lambda: Start(config, folder).step)
    shared: Shared | None = None
    while True:
        trainer = build(phase=phase_after(config, step), shared=shared)
        code = trainer.train()
        trainer.history = [*trainer.shared.history, *trainer.history]
        if not trainer.ended_phase:
            return code, trainer
        step, shared = trainer.train_state.step, trainer.shared
        shared.history = trainer.history
        del trainer
        gc.unfreeze()  # the trainer froze what existed when it began
        gc.collect()
        torch.compiler.reset()  # otherwise the second row length would be compiled as a dynamic one
        torch.cuda.empty_cache()
