"""The training loop: set up the folder, mesh, model, data and checkpoint, then run all steps."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.build import build_model, compiles, compute_dtype
from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.config.phases import RunPhase
from toolkit.cpu.memory import keep_freed_memory
from toolkit.data.batch_size import batch_shape
from toolkit.data.build import run_tokenizer
from toolkit.data.build_loader import training_loader
from toolkit.data.run_data import RunData
from toolkit.distributed import process_group
from toolkit.distributed.agreement import Ranks
from toolkit.distributed.garbage_collection import GarbageCollection
from toolkit.distributed.seeds import seed_step, set_deterministic
from toolkit.errors import EXIT_ERROR, EXIT_FINISHED, EXIT_REQUEUE, ConfigError, OutOfMemory, TrainingError
from toolkit.io.run_folder import claim_folders
from toolkit.launcher.signals import StopRequest
from toolkit.launcher.time_limit import Deadline
from toolkit.metrics.logger import MetricLogger
from toolkit.metrics.memory import memory_usage
from toolkit.metrics.speed import SpeedMeter, build_speed_meter
from toolkit.metrics.startup_timer import StartupTimer
from toolkit.metrics.summary import summary
from toolkit.models.from_config import model_args, pretrained_folder
from toolkit.models.teacher import teacher_folder
from toolkit.optim.ema import weight_average
from toolkit.optim.groups import GroupSummary, summaries
from toolkit.optim.lr_scheduler import invalid_rate, is_registered, learning_rate, shortened_phases
from toolkit.optim.optimizer import build_optimizer
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.parallel.mesh import Mesh, build_mesh
from toolkit.step_hooks import StepHook, StepResult
from toolkit.train_step import TrainState, TrainStep

if TYPE_CHECKING:
    from toolkit.checkpointer import Checkpointer
    from toolkit.evaluation.in_training import InTraining
    from toolkit.validate import Validator


class Shared:
    """State that the trainers of a run's phases share: time limit, request to stop, locked folders, process
    groups and history."""

    def __init__(self, config: Config):
        self.deadline = Deadline(config.job.time_limit, os.environ)
        self.request: StopRequest | None = None  # from the first step on
        self.claimed = claim_folders(config)
        self.file_group = process_group.new_file_group(timeout_seconds=config.comm.save_timeout_seconds)
        self.meshes: dict[ParallelDims, Mesh] = {}
        self.history: list[dict[str, Any]] = []
        self.resume_step: int | None = None


class Trainer:
    """One run: built from a configuration, resumed from the newest checkpoint, and trained to the last step.

    Needs a process group. After :meth:`train`, ``history`` contains the logged values of this process.
    ``hooks`` are called around each step; add more before calling :meth:`train`. With a ``phase`` of the
    run, only that one is trained; see :mod:`toolkit.run_phases`.
    """

    history: list[dict[str, Any]]
    log: MetricLogger

    def __init__(
        self,
        config: Config,
        data: RunData,
        device: torch.device,
        timer: StartupTimer,
        *,
        phase: RunPhase | None = None,
        shared: Shared | None = None,
    ):
        assert phase or not config.phases, "toolkit.run_phases trains a run in phases"
        self.run_config, self.phase, self.ended_phase = config, phase, False
        self.config = config = phase.config if phase else config
        self.data = data
        self.device = device
        self.seed = config.debug.seed or 0
        self.train_state = TrainState()
        if config.debug.bitwise_data_parallel and device.type == "cpu":
            torch.set_num_threads(1)  # sums are split over threads, whose number follows that of the ranks
        set_deterministic(config.debug.deterministic, warn_only=config.debug.deterministic_warn_only)
        self.shared = shared or Shared(self.run_config)
        self.folder = expand_user(config.job.dump_folder)
        self._build_mesh()
        with timer("model"):
            self._build()
        self.compile_clock = self._compile_clock()
        ranks: dict[str, Any] = {"dp_rank": self.mesh.dp_rank, "dp_size": self.mesh.dp_size}
        previous = phase.previous if phase else None
        self.loader = training_loader(config, data, self.batch, seed=self.seed, previous=previous, **ranks)
        self.validation: Validator | None = None
        if config.validation.enable:
            from toolkit.validate import Validator

            average = weight_average(self.optimizer)
            self.validation = Validator(
                config, data, self.model_parts, device=device, average=average, **ranks
            )
            self.train_state.best_of = self.validation.loader.identity
        self.evaluation: InTraining | None = None
        if config.evaluation.tasks:
            from toolkit.evaluation.in_training import InTraining

            best = config.checkpoint.keep_best_metric if config.checkpoint.keep_best else ""
            # Compiled blocks and float8 kernels have static shapes.
            is_static = bool(config.compile.enable or config.model.converters)
            self.evaluation = InTraining(
                config.evaluation, run_tokenizer(config), self.model_parts, self.mesh, device,
                best=best, length=self.args.max_seq_len,
                static_length=config.training.seq_len if is_static else None,
            )  # fmt: skip
            self.train_state.best_of = self.evaluation.best_of or self.train_state.best_of
        self.steps_an_epoch = self.loader.epoch_samples / self.batch.total
        self.checkpointer: Checkpointer | None = None
        compute = self._prepare_reference(timer)
        if config.checkpoint.enable:
            with timer("checkpoint"):
                self.checkpointer = self._checkpointer()
                self.checkpointer.restore(compute)
        elif compute:
            compute()
        self.total_steps = self.count_steps()
        if config.training.epochs and is_registered(config.lr_scheduler):
            self._check_rates()
        self.hooks: list[StepHook] = []
        if every := config.metrics.fingerprint_every:
            from toolkit.metrics.fingerprint import Fingerprints

            fingerprints = Fingerprints(
                self.folder, every=every, resume_step=self.train_state.step, optimizer=self.optimizer,
                parameters=self.model_parts.named_parameters, buffers=self.model_parts.named_buffers,
            )  # fmt: skip
            self.train_step.on_gradients = fingerprints.take_gradients
            self.hooks.append(fingerprints)
        self.speed = self._speed_meter(self.hooks)

    # Building

    def _build_mesh(self) -> None:
        config = self.config
        layout = degrees(config.parallelism, dist.get_world_size())
        assert layout is not None, "the preflight checks the world size"
        meshes, self.file_group = self.shared.meshes, self.shared.file_group
        if layout not in meshes:
            meshes[layout] = build_mesh(self.device, **asdict(layout))
        self.mesh = meshes[layout]
        process_group.set_timeout(config.comm.init_timeout_seconds, except_for=self.file_group)
        shape = batch_shape(config.training, dp=self.mesh.dp_size)
        assert shape is not None, "the preflight checks the batch"
        self.batch = shape

    def _build(self) -> None:
        config = self.config
        self.args = model_args(config, tokenizer_vocab=self.data.n_words)
        self.param_dtype = compute_dtype(config, self.device)
        if self.device.type == "cpu" and config.training.cpu_fast_paths:
            keep_freed_memory()
        self.model_parts = build_model(
            config,
            self.args,
            self.mesh,
            self.device,
            param_dtype=self.param_dtype,
            seed=self.seed,
            # Skip initialization that loading would overwrite: generating values takes longer than loading.
            pretrained=pretrained_folder(config) is not None,
            weighted=self.data.weighted,
        )
        if config.distillation.enable:
            self._load_teacher()
        parameters = [*self.model_parts.named_parameters(), *self.model_parts.tied_copies()]
        self.optimizer = build_optimizer(parameters, config, n_layers=self.args.n_layers)
        for hook in self.model_parts.after_update:
            self.optimizer.register_step_post_hook(lambda *_, hook=hook: hook())
        self.groups = self._groups() if config.optimizer.has_groups else []
        self.train_step = TrainStep(
            self.model_parts,
            self.optimizer,
            max_norm=config.training.max_norm,
            device=self.device,
            in_backward=config.optimizer.early_step_in_backward,
        )

    def _load_teacher(self) -> None:
        from toolkit.finetune.distillation import DistillationObjective
        from toolkit.weights.pretrained import load_hugging_face

        objective = self.model_parts.objective
        assert isinstance(objective, DistillationObjective)
        folder = teacher_folder(self.config)
        load_hugging_face(objective.teacher, folder, broadcast=False, group=self.file_group)

    def _groups(self) -> list[GroupSummary]:
        from toolkit.finetune.parameters import all_shapes, trained_names

        shapes, options = all_shapes(self.args, self.config.finetune), self.config.finetune
        names = trained_names(shapes, self.args, options)
        sizes = {name: math.prod(shape) for name, shape in shapes.items() if name in names}
        return list(summaries(sizes, self.config.optimizer, self.args.n_layers))

    def _compile_clock(self) -> Callable[[], float]:
        """Return a function that returns the seconds spent compiling since its last call."""
        if not compiles(self.config, self.device, self.args):
            return lambda: 0.0
        from toolkit.parallel.compile import CompileClock

        return CompileClock().take

    def _prepare_reference(self, timer: StartupTimer) -> Callable[[], None] | None:
        """Load the stored reference, or return a function that computes it with the initial weights."""
        self._reference: dict[str, str] = {}
        if not self.config.finetune.stores_reference:
            return None
        from toolkit.finetune.reference import StoredReference

        stored = StoredReference(
            self.config, self.args, self.model_parts,
            [self.loader, *([self.validation.loader] if self.validation else [])],
            device=self.device, ranks=Ranks(self.file_group),
        )  # fmt: skip
        self._reference = {"reference": stored.identity}
        if stored.read():
            return None

        def compute() -> None:
            with timer("reference"):
                stored.compute(dp_rank=self.mesh.dp_rank, dp_size=self.mesh.dp_size)

        return compute

    def _checkpointer(self) -> Checkpointer:
        from toolkit.checkpointer import Checkpointer, run_metadata

        return Checkpointer(
            self.config, self.folder, model_parts=self.model_parts, optimizer=self.optimizer,
            position=self.loader, state=self.train_state, group=self.file_group,
            metadata=run_metadata(
                self.run_config, self.args, mesh=str(self.mesh), batch=self.batch,
                data_parallel=self.mesh.dp_size,
            )
            | self._reference,
        )  # fmt: skip

    @property
    def end_step(self) -> int:
        """The step after which :meth:`train` returns: the last one of the phase or of the run."""
        return self.phase.end if self.phase else self.total_steps

    def count_steps(self) -> int:
        """Return the total steps of the run. With epochs, this is the finished steps plus those for the
        remaining samples, because earlier steps may have had another batch size or may have been rolled
        back."""
        training = self.config.training
        if not training.epochs:
            return training.steps
        left = training.epochs * self.loader.epoch_samples - self.loader.samples
        return self.train_state.step + max(0, -(-left // self.batch.total))

    def _check_rates(self) -> None:
        """Check the learning rate of every step, as the preflight does if it knows the number of steps.

        Raises:
            ConfigError: a custom schedule returns an invalid rate, such as a negative one.
        """
        done = self.train_state.step - self.train_state.schedule_start
        left = range(done + 1, self.total_steps - self.train_state.schedule_start + 1)
        if problem := invalid_rate(self.config, left, total_steps=self.total_steps):
            raise ConfigError(problem)

    # Training

    def train(self) -> int:
        """Train to the last step and return the exit code."""
        self._start_log()
        try:
            self._add_profiling()
            with ExitStack() as stack:
                for hook in self.hooks:
                    stack.enter_context(hook)
                if self.checkpointer and self.checkpointer.finish_without_training(self.total_steps):
                    return EXIT_FINISHED
                return self._loop()
        except torch.OutOfMemoryError as error:  # after the hooks, which write a memory snapshot
            from toolkit.metrics.out_of_memory import out_of_memory_advice
            from toolkit.metrics.profiling import snapshot_folder

            snapshots = snapshot_folder(self.config.profiling, self.folder)
            raise OutOfMemory(
                out_of_memory_advice(self.device, self.train_state.step, error, snapshots=snapshots)
            ) from error
        finally:
            self.log.close()
            if not self.ended_phase:
                self.shared.claimed.close()

    def _loop(self) -> int:
        training, deadline = self.config.training, self.shared.deadline
        request = self.shared.request = self.shared.request or StopRequest(deadline)
        garbage = GarbageCollection(training.gc_freq, debug=training.gc_debug)
        self._batches = iter(self.loader)
        state, speed = self.train_state, self.speed
        speed.read()  # start measuring here
        first = state.step + 1
        if state.step == 0 and self.validation and self.validation.due(0):
            self._measure("validation", request, self.validation.run, last=False)
        deadline.begin()
        while state.step < self.end_step:
            state.step += 1
            step, last = state.step, state.step == self.total_steps
            seed_step(self.seed, step, 0 if self.model_parts.bitwise else self.mesh.dp_rank)
            if self.model_parts.noise:
                self.model_parts.noise.step = step
            with speed.data_wait():
                micro_batches = list(islice(self._batches, self.batch.accumulation))
            for hook in self.hooks:
                hook.before_step(step)
            try:
                result = self.train_step(
                    micro_batches, learning_rate=self._learning_rate(), stop=request.asked
                )
            except TrainingError as error:
                if self.checkpointer:  # finish a running save before all ranks fail together
                    self.checkpointer.end_save(wait=True)
                raise TrainingError(f"step {step}: {error}") from None
            state.tokens += result.tokens
            speed.step(result.tokens)
            speed.add_excluded("compile", self.compile_clock())
            for hook in self.hooks:
                hook.after_step(step, result)
            if state.step != step:  # a hook rolled back to an earlier step
                continue
            if step == first or last or step % self.config.metrics.log_freq == 0:
                self._log_step(result)
            if step == first:
                process_group.set_timeout(self.config.comm.train_timeout_seconds, except_for=self.file_group)
            # A stop request leaves little time: save first, without validating.
            stop = result.stop
            if self.validation and self.validation.due(step, last=last) and not stop:
                stop = self._measure("validation", request, self.validation.run, last=last)
            if self.evaluation and self.evaluation.due(step, last=last) and not stop:
                stop = self._measure("evaluation", request, self.evaluation.run)
            if self.checkpointer:
                self.checkpointer.after_step(speed.exclude, last=last, stop=stop or step == self.end_step)
            self.log.advance(step)
            garbage.after_step(step)
            deadline.lap()
            if stop:
                break
        else:
            self.ended_phase = state.step < self.total_steps
        if self.ended_phase:
            return EXIT_FINISHED
        request.release()
        return self._report_finished() if state.step == self.total_steps else self._report_stop(request)

    def resume_data(self, samples: int) -> None:
        """Resume the data at sample ``samples`` after the running trainer loaded a checkpoint."""
        history, step = self.history, self.train_state.step
        self.loader.load_state_dict({**self.loader.state_dict(), "samples": samples})
        self._batches = iter(self.loader)
        # At least one step remains: the last one validates, saves and exports.
        self.total_steps = max(self.count_steps(), step + 1)
        self.log.close()
        self._start_log()
        self.history = [record for record in history if record["step"] <= step]

    def _add_profiling(self) -> None:
        options = self.config.profiling
        if options.enable_profiling or options.enable_memory_snapshot:
            from toolkit.metrics.profiling import ProfilingHook

            start: dict[str, Any] = {"first_step": self.train_state.step + 1, "device": self.device}
            self.hooks.append(
                ProfilingHook(options, self.folder, say=self.log.say, exclude=self.speed.exclude, **start)
            )

    def _speed_meter(self, hooks: list[StepHook]) -> SpeedMeter:
        @contextmanager
        def mark(
            name: str,
        ) -> Iterator[None]:  # does not capture self, which a reference cycle would keep alive
            with ExitStack() as stack:
                for hook in hooks:
                    stack.enter_context(hook.during(name))
                stack.enter_context(torch.profiler.record_function(f"toolkit::{name}"))
                yield

        return build_speed_meter(
            self.config.metrics,
            self.args,
            seq_len=self.config.training.seq_len,
            samples=self.batch.total,
            device=self.device,
            dtype=self.param_dtype,
            finetune=self.config.finetune,
            mark=mark,
        )

    def _learning_rate(self) -> float:
        return learning_rate(
            self.train_state.step - self.train_state.schedule_start - 1,
            self.config.lr_scheduler,
            lr=self.config.optimizer.lr,
            total_steps=self.total_steps,
            steps_an_epoch=self.steps_an_epoch,
        )

    def _measure(
        self, name: str, request: StopRequest, measure: Callable[..., dict[str, Any] | None], **options: Any
    ) -> bool:
        """Validate or run tasks by ``measure``; return True if a stop request cut it short."""
        with self.speed.exclude(name):
            values = measure(self.train_state, stop=lambda: request.asked, **options)
        self.compile_clock()  # compilation during it is already excluded with it
        if values is not None:
            self.record(values)
        return values is None

    # Reporting

    def _start_log(self) -> None:
        self.history = []
        state = self.train_state
        self.log = MetricLogger(
            self.config.metrics,
            self.folder,
            total_steps=self.total_steps,
            resume_step=state.step,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            config_text=self.run_config.to_toml(),
            config=self.run_config.model_dump(),
        )
        if self.shared.resume_step is None:
            self.shared.resume_step = state.step
        if self.checkpointer:
            self.checkpointer.say = self.log.say
        for message in self._startup_messages():
            self.log.say(message)
        if state.step:
            self.log.say(f"resumed after step {state.step}, {state.tokens:,} tokens")

    def _startup_messages(self) -> Iterator[str]:
        """Return messages that need the tokenized corpus: its length, and each corpus's share of a
        mixture."""
        epochs = self.config.training.epochs
        if self.phase and self.phase.name:
            batch = f"{self.batch.total} samples of {self.config.training.seq_len} tokens"
            yield f"phase {self.phase.name}: {batch} to step {self.end_step}"
        if epochs:
            yield (
                f"{self.total_steps} steps: training.epochs {epochs}, "
                f"{self.loader.epoch_samples:,} samples each"
            )
            yield from shortened_phases(self.config.lr_scheduler, self.total_steps)
        yield from (group.describe(self.config.optimizer.lr) for group in self.groups)
        yield from (f"training: {line}" for line in self.loader.conversations())
        if self.validation:
            yield from (f"validation: {line}" for line in self.validation.loader.conversations())
        if self.loader.mixture:
            steps = self.end_step - (self.phase.start if self.phase else 0)
            yield self.loader.mixture.describe(steps * self.batch.total)
        if dist.get_world_size() > int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size()):
            from toolkit.distributed.clocks import clock_skew

            yield from clock_skew()

    def _log_step(self, result: StepResult) -> None:
        values: dict[str, Any] = {
            "loss": result.loss,
            **result.reported,
            "grad_norm": result.grad_norm,
            **{it.metric: self._learning_rate() * it.lr_ratios[1] for it in self.groups},
            "lr": self._learning_rate(),
            "tokens": self.train_state.tokens,
        }
        values |= self.speed.read() | memory_usage(self.device)
        for hook in self.hooks:
            values = hook.log_values(values)
        self.record(values)
        step, experts = self.train_state.step, self.model_parts.expert_load
        if experts and (step % (10 * self.config.metrics.log_freq) == 0 or step == self.total_steps):
            self.log.draw(step, "moe/load", experts.of_mean.cpu().numpy())

    def record(self, values: dict[str, Any]) -> None:
        """Log the values or the event of the current step and append them to the history."""
        self.history.append({"step": self.train_state.step, **values})
        self.log.log(self.train_state.step, values)

    # End of a run

    def _report_finished(self) -> int:
        step = self.train_state.step
        self.log.advance(step)
        saved = None
        if self.checkpointer and self.checkpointer.due(last=True, stop=False):
            saved = self.checkpointer.step_folder
        initial = self.validation.initial_losses(self.train_state) if self.validation else {}
        text = summary(
            [{"step": 0, **initial}, *self.shared.history, *self.history],
            steps=step,
            tensorboard=expand_user(self.config.metrics.save_tb_folder, inside=self.folder)
            if self.config.metrics.enable_tensorboard
            else None,
            checkpoint=saved,
            resumed=self.shared.resume_step or 0,
            first_loss=self.log.first_loss if self.shared.resume_step else None,
            trained=self._describe_trained(),
            of_tokens=self.config.finetune.objective == "sft" and not self.args.classifier,
        )
        self.log.say(text)
        if saved and not self.config.checkpoint.last_save_model_only:
            epochs = self.config.training.epochs
            longer = f"--training.epochs {2 * epochs}" if epochs else f"--training.steps {2 * step}"
            if self.config.checkpoint.load_step != -1:
                longer += f" --checkpoint.load_step {step}"
            self.log.say(
                f"to continue: the same command with {longer}; to start over: another --job.dump_folder"
            )
        return EXIT_FINISHED

    def _describe_trained(self) -> str:
        """Describe the trained part of the model, or return "" if all of it was trained."""
        if not self.config.finetune.chooses:
            return ""
        from toolkit.finetune.parameters import describe_trained

        bytes_each = getattr(torch, self.config.training.dtype).itemsize
        return describe_trained(self.args, self.config.finetune, bytes_each=bytes_each)

    def _report_stop(self, request: StopRequest) -> int:
        step, reason = self.train_state.step, request.reason
        if not self.checkpointer or not self.checkpointer.due(last=False, stop=True):
            self.log.say(f"stopped after step {step} by {reason} without saving: checkpoint.enable is false")
            return EXIT_ERROR
        again = "the same command resumes from it"
        if (first := self.config.checkpoint.load_step) != -1:
            again = f"to continue: --checkpoint.load_step {step}; the same command returns to step {first}"
        self.log.say(f"saved step {step} and stopped by {reason}; {again}")
        return EXIT_REQUEUE
