"""Train the phases of a run (``[phases.NAME]``) one after another, each with its own :class:`Trainer`.

At the end of a phase the run saves a checkpoint, and the next trainer resumes from it, as another process
would: with its own mesh, model and loader, and the same step, optimizer state, schedule and log. Therefore a
run that is interrupted in a phase, or between two, resumes exactly.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from toolkit.checkpoint.manifest import committed_steps, read_manifest
from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.config.phases import phase_after
from toolkit.distributed.agreement import Ranks
from toolkit.errors import EXIT_FINISHED
from toolkit.trainer import Shared, Trainer


def train_in_phases(config: Config, build: Callable[..., Trainer]) -> tuple[int, Trainer]:
    """Train to the last step, or until the run is stopped; return the exit code and the last trainer.

    ``build`` is :class:`Trainer` with its other arguments; it is called with a phase, if there are any.
    """
    if not config.phases:
        trainer = build()
        return trainer.train(), trainer
    step = Ranks().on_rank_0(partial(_first_step, config))
    history: list[dict[str, Any]] = []
    shared: Shared | None = None
    while True:
        trainer = build(phase=phase_after(config, step), shared=shared)
        code = trainer.train()
        history += trainer.history
        step, shared = trainer.train_state.step, trainer.shared
        if code != EXIT_FINISHED or step != trainer.end_step or step == trainer.total_steps:
            trainer.history = history
            return code, trainer
        del trainer
        gc.collect()
        torch._dynamo.reset()  # otherwise the second row length would be compiled as a dynamic one
        torch.cuda.empty_cache()


def _first_step(config: Config) -> int:
    """Return the step that the run resumes after."""
    options = config.checkpoint
    own = committed_steps(expand_user(options.folder, inside=expand_user(config.job.dump_folder)))
    if own:
        return max(own)
    if options.initial_load_path and not (options.initial_load_in_hf or options.initial_load_model_only):
        return int(read_manifest(expand_user(options.initial_load_path))["step"])
    return 0
