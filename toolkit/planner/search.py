"""The layouts of a world, fastest first: which fit, how long a step takes on each, and why the others lose.

Memory is reckoned (:mod:`toolkit.planner.estimate`) for those layouts of :mod:`toolkit.planner.layouts` that
the preflight accepts, then time (:mod:`toolkit.planner.time`) for those that fit. The best are run as fake
steps, and those of them that do not fit fall out.
"""

from __future__ import annotations

import functools
import heapq
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.config import Config
from toolkit.errors import ConfigError, Problem, divisors
from toolkit.hardware import Hardware
from toolkit.metrics.flops import model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.parallel.pipeline_schedules import bubble, pipeline_stages
from toolkit.planner.estimate import Estimate, estimate, fake_peak, samples, stored_bytes
from toolkit.planner.layouts import SIZES, checkpointing_of, fixed_batch, settings_of, with_settings
from toolkit.planner.machines import Machine
from toolkit.planner.rates import Rates
from toolkit.planner.work import BYTES
from toolkit.preflight.planned_run import RULES, PlannedRun, Rule

if TYPE_CHECKING:
    import torch

    from toolkit.planner.time import StepTime

GIB = 2**30
CONTEXT = 2.0 * GIB
"""Bytes of a GPU that CUDA's context, libraries' workspaces and NCCL's buffers of some groups take."""
FRAGMENTED = 0.05
"""Part of a GPU's memory that lies between the blocks of the allocator."""
_VERIFIED = 3
_CLOSE = 1.1
"""By so much the estimate may be too large: up to there a layout is looked at."""
_LAYOUT_RULES = (
    *("mesh", "tensor_context_parallel", "pipeline", "fsdp"),
    *("optim", "adamw_8bit", "nf4", "float8"),
)


@dataclass(frozen=True)
class Candidate:
    """A layout with the settings that make it; ``peak`` are the bytes of a fake step, where one was taken."""

    config: Config
    settings: dict[str, Any]
    layout: ParallelDims
    memory: Estimate
    time: StepTime | None = None
    peak: float | None = None

    @property
    def bytes(self) -> float:
        return self.memory.bytes if self.peak is None else self.peak

    @property
    def seconds(self) -> float:
        return self.time.seconds if self.time else math.inf

    @property
    def key(self) -> tuple[float, float]:
        """The order of candidates."""
        return self.seconds, self.bytes


@dataclass
class Loser:
    """A class of ``count`` layouts that lose, and the best of them, if one was looked at; of those that the
    preflight refuses the ``reason`` of the first."""

    reason: str
    count: int = 0
    best: Candidate | None = None

    def add(self, candidate: Candidate | None = None) -> None:
        """Count one more; the best is the fastest, or what takes least where no time is known."""
        self.count += 1
        if candidate and (self.best is None or candidate.key < self.best.key):
            self.best = candidate


@dataclass
class Found:
    """``ranked`` layouts that fit into ``room`` bytes, ``losers`` by the name of their class, and how many
    layouts were ``timed``. ``states`` are the bytes of parameters, gradients and optimizer on all ranks."""

    room: float
    states: float = 0.0
    ranked: list[Candidate] = field(default_factory=list)
    losers: dict[str, Loser] = field(default_factory=dict)
    timed: int = 0

    def lose(self, name: str, reason: str = "") -> Loser:
        """The class of that name; the first ``reason`` that is given stays."""
        return self.losers.setdefault(name, Loser(reason))


def room(machine: Machine) -> float:
    """Bytes of a GPU that tensors may take."""
    return machine.memory * (1 - FRAGMENTED) - CONTEXT


def search(
    config: Config,
    args: ModelArgs,
    world: int,
    machine: Machine,
    *,
    param_dtype: torch.dtype,
    top: int = 10,
    progress: Callable[[str], object] = str,
) -> Found:
    """Rank the layouts of ``world`` ranks of ``machine``; there may be none. ``progress`` is told of each.

    Raises:
        ConfigError: the preflight has something against each layout.
    """
    queue = _Queue(config, args, world, machine, param_dtype, progress)
    found, verified = queue.found, 0
    for candidate in queue.fastest():
        if verified < _VERIFIED:
            progress(f"memory of {candidate.layout} measured in a fake step")
            peak = fake_peak(
                candidate.config, args, candidate.layout, candidate.memory, queue.stored, param_dtype
            )
            candidate = replace(candidate, peak=peak)
            verified += candidate.bytes <= found.room
        if candidate.bytes > found.room:
            found.lose("fit").add(candidate)
            continue
        found.ranked.append(candidate)
        if len(found.ranked) == top:
            break
    queue.lose_rest()
    return found


def _why(loser: Candidate, winner: Candidate) -> str:
    """Name the part of a step of which the ``loser`` has more than the ``winner``."""
    assert loser.time and winner.time
    parts, least = (
        {"compute": it.compute, "bubble": it.bubble, **it.exposed} for it in (loser.time, winner.time)
    )
    return max(parts, key=lambda name: parts[name] - least.get(name, 0.0))


def fits(config: Config, args: ModelArgs, world: int, machine: Machine, param_dtype: torch.dtype) -> bool:
    """Say if the model fits on some layout of ``world`` ranks, by the estimate."""
    queue = _Queue(config, args, world, machine, param_dtype, str)
    try:
        return any(it.bytes <= queue.found.room for it in queue.fastest())
    except ConfigError:
        return False


@dataclass
class _Family:
    """Layouts of one tp and pp: the degrees of cp that are left, and whether one that was tried ``fits``."""

    tp: int
    pp: int
    left: list[int]
    tried: list[tuple[Config, ParallelDims]] = field(default_factory=list)
    fits: bool = False


class _Queue:
    """Layouts, fastest first, of which only those are looked at that may be next.

    Each waits under a time that it cannot be faster than: at first that of its GEMMs and of the pipeline's
    bubble, then that without recomputation, at last its own.
    """

    def __init__(
        self,
        config: Config,
        args: ModelArgs,
        world: int,
        machine: Machine,
        param_dtype: torch.dtype,
        progress: Callable[[str], object],
    ):
        self.config, self.args, self.world = fixed_batch(config, world), args, world
        self.machine, self.param_dtype, self.progress = machine, param_dtype, progress
        self.stored = stored_bytes(self.config, args, param_dtype)
        self.found = Found(room(machine))
        self.found.states = args.n_layers * sum(self.stored.whole_block) + sum(self.stored.whole_ends)
        self._hardware = Hardware("cuda", machine.name, machine.node, "bfloat16" in machine.peak, 9.0)
        self._problems: list[Problem] = []
        self._accepted = self._fitting = 0
        self._waiting: list[tuple[float, float, int, Callable[[], Candidate | None], Candidate | None]] = []
        self._count = itertools.count()
        self._full: set[str] = set()  # layouts with their checkpointing that a smaller micro-batch has filled

    def fastest(self) -> Iterator[Candidate]:
        """The candidates that fit by the estimate, or nearly, in order.

        Raises:
            ConfigError: the preflight has something against each layout.
        """
        for tp in divisors(self.world):
            if self.machine.node % tp:
                self.found.lose("node").add()
                continue
            for pp in divisors(self.world // tp):
                self._next_cp(_Family(tp, pp, divisors(self.world // (tp * pp))))
        while self._waiting:
            _, _, _, look, _ = heapq.heappop(self._waiting)
            if candidate := look():
                yield candidate
        if not self._accepted and self._problems:
            raise ConfigError(list({problem.key: problem for problem in self._problems}.values()))

    def lose_rest(self) -> None:
        """Count those that were not next."""
        for *_, candidate in self._waiting:
            if candidate and candidate.bytes <= self.found.room:
                self.found.lose(_why(candidate, self.found.ranked[0])).add(candidate)
            else:
                self.found.lose("fit" if candidate else "bound").add(candidate)

    def _wait(
        self, seconds: float, look: Callable[[], Candidate | None], candidate: Candidate | None = None
    ) -> None:
        size = candidate.bytes if candidate else 0.0
        heapq.heappush(self._waiting, (seconds, size, next(self._count), look, candidate))

    def _next_cp(self, family: _Family) -> None:
        """Let the layouts of the next degree of cp wait, if there is one."""
        while family.left:
            cp, *family.left = family.left
            dp = self.world // (family.tp * family.pp * cp)
            if self.config.training.global_batch_size % dp == 0:
                break
            self.found.lose("batch").add()
        else:
            return
        mesh = ParallelDims(family.pp, 1, dp, cp, family.tp)
        parameters, gradients, state = self.stored.whole_block
        training = self.config.training
        # A pipeline keeps whole gradients, whatever dp and cp are.
        whole = gradients / BYTES[training.dtype] * BYTES[training.mixed_precision_reduce]
        if family.pp > 1 and whole * self.args.n_layers / (family.pp * family.tp) > self.found.room:
            self.found.lose("fit").count += 1 + len(family.left)
            return
        if self.config.optimizer.early_step_in_backward:
            gradients = 0
        held = self.args.n_layers * (parameters + gradients + state) / (mesh.tp * mesh.pp * mesh.cp)
        if training.enable_cpu_offload:
            held = 0.0

        def lose(name: str, count: int) -> None:
            self.found.lose(name).count += count

        node, room = self.machine.node, self.found.room
        for settings in settings_of(self.config, self.args, mesh, node, held, room, lose):
            asked = with_settings(self.config, settings)
            layout = degrees(asked.parallelism, self.world)
            assert layout
            family.tried.append((asked, layout))
            seconds = least_seconds(asked, self.args, layout, self.machine, self.param_dtype)
            self._wait(seconds, partial(self._without_recomputation, family, settings, asked, layout))
        if family.left:
            # Behind layouts without a bubble, whose memory may say it for nothing.
            alone = least_seconds(self.config, self.args, replace(mesh, pp=1), self.machine, self.param_dtype)
            self._wait(alone * 1.0001, partial(self._larger_cp, family))

    def _larger_cp(self, family: _Family) -> None:
        if self._fits(family):
            self.found.lose("needless cp").count += len(family.left)
        else:
            self._next_cp(family)

    def _fits(self, family: _Family) -> bool:
        """Say if one of the family's layouts that were tried fits, the likeliest ones first."""
        for whole in (True, False):
            for asked, layout in [] if family.fits else family.tried:
                if self._broken(asked):
                    continue
                *others, none = checkpointing_of(asked)
                for choice in [none, *others]:
                    tried = with_settings(asked, choice)
                    memory = estimate(tried, self.args, layout, self.stored, self.param_dtype, whole=whole)
                    if memory.bytes <= self.found.room:
                        family.fits = True
                        return True
        return family.fits

    def _without_recomputation(
        self, family: _Family, settings: dict[str, Any], asked: Config, layout: ParallelDims
    ) -> None:
        """Find the time of a layout that recomputes nothing, and let its choices of checkpointing wait."""
        choices = checkpointing_of(asked)
        if self._is_full(settings, choices[0]):
            self.found.lose("fit").add()
            return
        if self._broken(asked):
            return
        *others, none = choices
        took = self._time(with_settings(asked, none), layout)
        for choice in others:
            self._wait(took.seconds, partial(self._candidate, family, settings, choice, layout))
        self._candidate(family, settings, none, layout, took)

    def _candidate(
        self,
        family: _Family,
        settings: dict[str, Any],
        choice: dict[str, Any],
        layout: ParallelDims,
        took: StepTime | None = None,
    ) -> None:
        """Let a layout with its checkpointing wait under its own time, if it fits."""
        if self._is_full(settings, choice):
            self.found.lose("fit").add()
            return
        tried = with_settings(self.config, settings | choice)
        memory = estimate(tried, self.args, layout, self.stored, self.param_dtype)
        candidate = Candidate(tried, settings | choice, layout, memory)
        family.fits = family.fits or candidate.bytes <= self.found.room
        if candidate.bytes > self.found.room * _CLOSE:
            self._full.add(_but_for_sizes(settings, choice))
            self.found.lose("fit").add(candidate)
            return
        candidate = replace(candidate, time=took or self._time(tried, layout))
        self.found.timed += 1
        self.progress(f"memory and step time estimated for {self.found.timed} layouts that fit")
        self._wait(candidate.seconds, lambda: candidate, candidate)

    def _time(self, config: Config, layout: ParallelDims) -> StepTime:
        from toolkit.planner.time import step_time

        self.progress(f"step time of {layout} estimated")
        return step_time(config, self.args, layout, self.machine, param_dtype=self.param_dtype)

    def _is_full(self, settings: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Say if a smaller micro-batch has taken too much."""
        return _but_for_sizes(settings, choice) in self._full

    def _broken(self, config: Config) -> bool:
        """Say if the preflight's rules about layouts have something against ``config``, and count it."""
        config = with_settings(config, {"activation_checkpoint.mode": "none"})
        run = PlannedRun(config, self.world, self._hardware)
        problems = [problem for it in _layout_rules() for problem in it.check(run)]
        self._problems += problems
        self._accepted += not problems
        if problems:
            self.found.lose(problems[0].key, problems[0].rule).add()
        return bool(problems)


@functools.cache
def _layout_rules() -> list[Rule]:
    files = [importlib.import_module(f"toolkit.preflight.rules.{file}").__name__ for file in _LAYOUT_RULES]
    return [it for it in RULES.values() if it.check.__module__ in files]


def _but_for_sizes(settings: dict[str, Any], choice: dict[str, Any]) -> str:
    return str([it for it in (settings | choice).items() if it[0] not in SIZES])


def least_seconds(
    config: Config, args: ModelArgs, layout: ParallelDims, machine: Machine, param_dtype: torch.dtype
) -> float:
    """Seconds that a step takes at least: all GEMMs of the model at the best rate, and the pipeline's
    bubble."""
    rates = Rates(config, layout, machine, str(param_dtype).removeprefix("torch."))
    reached = max(machine.matmul, machine.attention) * rates.peak
    if rates.float8:
        reached = max(reached, rates.peak_float8)
    waits = 0.0
    if layout.pp > 1:
        stages = len(pipeline_stages(config.parallelism, args.n_layers).modules)
        name = config.parallelism.pipeline_parallel_schedule
        waits = bubble(name, samples(config, layout)[1], stages=stages, pp=layout.pp)
    tokens = config.training.global_batch_size * config.training.seq_len
    flops = model_flops(args, config.finetune, seq_len=0)
    return flops * tokens / (reached * layout.world_size) / (1 - waits)
