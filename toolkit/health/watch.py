"""Step hooks for ``[health]``; imported only by runs that enable at least one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from toolkit.config.job import Health
from toolkit.errors import TrainingError
from toolkit.health.heartbeat import Heartbeat
from toolkit.health.stragglers import Stragglers
from toolkit.parallel.guard import Guard
from toolkit.step_hooks import StepHook, StepResult
from toolkit.trainer import Trainer


def health_hooks(trainer: Trainer) -> list[StepHook]:
    """Return the hooks enabled in the configuration of ``trainer``, in calling order."""
    options, rank = trainer.config.health, dist.get_rank()
    hooks: list[StepHook] = []
    if options == Health():
        return hooks
    if options.straggler_factor is not None and dist.get_world_size() > 1:
        hooks.append(Stragglers(options.straggler_factor, trainer.device, trainer.record))
    hooks.append(Policies(trainer))
    if options.heartbeat_seconds is not None and (rank == 0 or trainer.config.metrics.save_for_all_ranks):
        heartbeat = Heartbeat(
            trainer.folder / ("heartbeat.json" if rank == 0 else f"heartbeat.rank-{rank}.json"),
            seconds=options.heartbeat_seconds,
            rank=rank,
            step=lambda: trainer.train_state.step,
            end=lambda: _end(trainer),
        )
        heartbeat.beat("starting")
        hooks.append(heartbeat)
    return hooks


def _end(trainer: Trainer) -> str:
    """Return the last state of a heartbeat without a failure."""
    if trainer.ended_phase:
        return "starting"
    seed = trainer.config.checkpoint.create_seed_checkpoint
    return "finished" if seed or trainer.train_state.step >= trainer.total_steps else "stopped"


class Policies(StepHook):
    """Skips batches with a spike or a nonfinite loss or gradient norm, or rolls the run back."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._back_to, self._times = -1, 0  # the step of the last rollback, and the number of rollbacks to it
        self.guard = Guard(trainer.config.health, lambda: trainer.train_state.health)
        self.train_step = trainer.train_step
        self.train_step.guard = self.guard
        self.train_step.limits = self.guard.limits()

    def after_step(self, step: int, result: StepResult) -> None:
        state, rejected, self.guard.rejected = self.trainer.train_state, self.guard.rejected, None
        if rejected is None:
            self.guard.accept(result.loss, result.grad_norm)
        else:
            state.tokens -= result.tokens
            end = self.trainer.loader.samples
            event: dict[str, Any] = {"reason": rejected.reason, "refused_loss": rejected.loss}
            event |= {"refused_grad_norm": rejected.grad_norm, "refused_step": step}
            if rejected.rolls_back:
                with self.trainer.speed.exclude("checkpoint"):
                    self._roll_back(end, event)
            else:
                total = state.health["skipped_batches"] = state.health.get("skipped_batches", 0) + 1
                event["samples"] = [end - self.trainer.batch.total, end]
                self.trainer.record({"event": "SKIPPED", **event, "skipped_batches": total})
        self.train_step.limits = self.guard.limits()

    def _roll_back(self, end: int, event: dict[str, Any]) -> None:
        """Load the newest checkpoint, and continue with the samples from ``end`` on."""
        trainer = self.trainer
        assert trainer.checkpointer, "the preflight rejects rollback without checkpoints"
        back_to = trainer.checkpointer.roll_back()
        rejected = f"step {event['refused_step']}: {event['reason']}"
        if back_to is None:
            raise TrainingError(
                f"{rejected}; there is no checkpoint of an earlier step to roll back to\n"
                "  fix:  lower checkpoint.interval, or skip such batches"
            )
        times = self._times + 1 if back_to == self._back_to else 1
        self._back_to, self._times = back_to, times
        if times > trainer.config.health.max_skips:
            raise TrainingError(
                f"{rejected}; the run has already rolled back to step {back_to} {times - 1} times "
                "(health.max_skips)\n  fix:  lower optimizer.lr, or roll back further (checkpoint.load_step)"
            )
        samples = [trainer.loader.samples, end]
        trainer.resume_data(end)
        trainer.record({"event": "ROLLED BACK", **event, "samples": samples, "rollbacks": times})
