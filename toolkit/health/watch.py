"""Everything that ``[health]`` asks of a run, behind one object; imported by runs that ask for any of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from toolkit.build import compiles
from toolkit.errors import TrainingError
from toolkit.parallel.guard import Guard

if TYPE_CHECKING:  # read by runs that use them
    from toolkit.health.heartbeat import Heartbeat
    from toolkit.health.stragglers import Stragglers
    from toolkit.metrics.speed import SpeedMeter
    from toolkit.train_step import StepResult
    from toolkit.trainer import Trainer


class Watch:
    """The health of the run of ``trainer``, looked at after each step."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._back_to, self._times = -1, 0  # the checkpoint of the last roll-back, and how often
        self._done = trainer.train_state.step  # the state counts the one in progress too
        self.guard = Guard(trainer.config.health, lambda: trainer.train_state.health)
        self.train_step = trainer.train_step
        self.train_step.guard = self.guard
        self.train_step.limits = self.guard.limits()
        options, rank = trainer.config.health, dist.get_rank()
        self.stragglers: Stragglers | None = None
        if options.straggler_factor is not None and dist.get_world_size() > 1:
            from toolkit.health.stragglers import Stragglers

            compiled = compiles(trainer.config, trainer.device)
            self.stragglers = Stragglers(options.straggler_factor, trainer.device, compiled=compiled)
            trainer.train_step = self.stragglers.timed(self.train_step)  # type: ignore[assignment]
        self.heartbeat: Heartbeat | None = None
        if options.heartbeat_seconds is not None and (rank == 0 or trainer.config.metrics.save_for_all_ranks):
            from toolkit.health.heartbeat import Heartbeat

            path = trainer.folder / ("heartbeat.json" if rank == 0 else f"heartbeat.rank-{rank}.json")
            done = lambda: self._done  # noqa: E731
            self.heartbeat = Heartbeat(path, seconds=options.heartbeat_seconds, rank=rank, step=done)
            self.heartbeat.beat("starting")

    def after_step(self, result: StepResult, speed: SpeedMeter) -> bool:
        """Look at what a step gave; True says that the run has gone back to an earlier one."""
        self._done = self.trainer.train_state.step
        if self.heartbeat:
            self.heartbeat.beat("training")
            speed.mark = self.heartbeat.marks(speed.mark)
        state, refusal, self.guard.refusal = self.trainer.train_state, self.guard.refusal, None
        if refusal is None:
            self.guard.accept(result.loss, result.grad_norm)
        else:
            state.tokens -= result.tokens
            end = self.trainer.loader.samples
            seen: dict[str, Any] = {"reason": refusal.reason, "refused_loss": refusal.loss}
            seen |= {"refused_grad_norm": refusal.grad_norm, "refused_step": state.step}
            if refusal.rolls_back:
                with speed.apart("checkpoint"):
                    self._roll_back(end, seen)
            else:
                total = state.health["skipped_batches"] = state.health.get("skipped_batches", 0) + 1
                seen["samples"] = [end - self.trainer.batch.total, end]
                self.trainer._record({"event": "SKIPPED", **seen, "skipped_batches": total})
        self.train_step.limits = self.guard.limits()
        return refusal is not None and refusal.rolls_back

    def compare(self, values: dict[str, Any]) -> dict[str, Any]:
        """The ``values`` of a logged step, and how this rank's time compares with the others'."""
        if self.stragglers is None:
            return values
        compared, event = self.stragglers.compare(values["data_seconds"])
        if event:
            self.trainer._record(event)
        return values | compared

    def close(self) -> None:
        """Leave word of how the run has ended; called while what it failed of, if it did, is raised."""
        if self.heartbeat:
            finished = self.trainer.train_state.step >= self.trainer.total_steps
            finished |= self.trainer.config.checkpoint.create_seed_checkpoint
            self.heartbeat.beat("failed" if sys.exc_info()[0] else "finished" if finished else "stopped")

    def _roll_back(self, end: int, seen: dict[str, Any]) -> None:
        """Go back to the newest checkpoint, and on with the samples from ``end``."""
        trainer, state = self.trainer, self.trainer.train_state
        assert trainer.checkpointer, "the preflight refuses to roll back without checkpoints"
        history, back_to = trainer.history, trainer.checkpointer.roll_back()
        self._done = state.step
        refused = f"step {seen['refused_step']}: {seen['reason']}"
        if back_to is None:
            raise TrainingError(
                f"{refused}; there is no checkpoint of an earlier step to roll back to\n"
                "  fix:  lower checkpoint.interval, or skip such batches"
            )
        times = self._times + 1 if back_to == self._back_to else 1
        self._back_to, self._times = back_to, times
        if times > trainer.config.health.max_skips:
            raise TrainingError(
                f"{refused}; the run has rolled back to step {back_to} {times - 1} times already "
                "(health.max_skips)\n  fix:  lower optimizer.lr, or roll back further (checkpoint.load_step)"
            )
        position = trainer.loader.state_dict()
        trainer.loader.load_state_dict({**position, "samples": end})
        # One step is left at least: the last one validates, saves and exports.
        trainer.total_steps = max(trainer.count_steps(), state.step + 1)
        trainer.log.close()
        trainer._start_log()
        trainer.history = [record for record in history if record["step"] <= state.step]
        samples = [position["samples"], end]
        trainer._record({"event": "ROLLED BACK", **seen, "samples": samples, "rollbacks": times})
