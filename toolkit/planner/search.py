"""Search the layouts of a world: return those that fit, fastest first, and the reasons to reject the others.

For the layouts of :mod:`toolkit.planner.layouts` that the preflight accepts, the search estimates memory
(:mod:`toolkit.planner.estimate`), and for those that fit also the step time (:mod:`toolkit.planner.time`).
Fake steps verify the best layouts.
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
from toolkit.metrics.flops_finetune import model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import table
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.parallel.pipeline_schedules import bubble, pipeline_stages
from toolkit.planner.estimate import Estimate, estimate, fake_peak, state_bytes
from toolkit.planner.layouts import (
    SIZES,
    checkpointing_settings,
    expert_degrees,
    fixed_batch,
    layout_settings,
    samples,
    with_settings,
)
from toolkit.planner.machines import Machine
from toolkit.planner.rates import Rates
from toolkit.planner.work import BYTES
from toolkit.preflight.planned_run import RULES, PlannedRun, Rule

if TYPE_CHECKING:
    import torch

    from toolkit.planner.time import StepTime

GIB = 2**30
CONTEXT = 2.0 * GIB
"""GPU memory in bytes taken by the CUDA context, library workspaces and NCCL buffers."""
FRAGMENTED = 0.05
"""Fraction of GPU memory lost to fragmentation."""
_VERIFIED = 3
_CLOSE = 1.1
"""Factor by which the estimate may exceed the usable memory before a layout is rejected."""
_LAYOUT_RULES = (
    *("mesh", "tensor_context_parallel", "pipeline", "fsdp"),
    *("optim", "adamw_8bit", "nf4", "float8", "experts"),
)


@dataclass(frozen=True)
class Candidate:
    """A layout and its settings; ``peak`` is the peak memory of a fake step, if one was run."""

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
        """Sort key of candidates."""
        return self.seconds, self.bytes


@dataclass
class RejectedLayouts:
    """A class of ``count`` rejected layouts, and the best that was estimated, if any. ``reason`` is the first
    one given by the preflight."""

    reason: str
    count: int = 0
    best: Candidate | None = None

    def add(self, candidate: Candidate | None = None) -> None:
        """Count one more layout; the best layout has the lowest step time or, if no time is known, the lowest
        memory."""
        self.count += 1
        if candidate and (self.best is None or candidate.key < self.best.key):
            self.best = candidate


@dataclass
class SearchResult:
    """Result of a search.

    Attributes:
        capacity: usable bytes per GPU.
        states: bytes of parameters, gradients and optimizer state on all ranks.
        ranked: layouts that fit, fastest first.
        rejected: classes of rejected layouts by name.
        timed: number of layouts whose step time was estimated.
    """

    capacity: float
    states: float = 0.0
    ranked: list[Candidate] = field(default_factory=list)
    rejected: dict[str, RejectedLayouts] = field(default_factory=dict)
    timed: int = 0

    def reject(self, name: str, reason: str = "") -> RejectedLayouts:
        """Return the class ``name`` of rejected layouts; its first ``reason`` is kept."""
        return self.rejected.setdefault(name, RejectedLayouts(reason))


def usable_memory(machine: Machine) -> float:
    """Return the bytes of GPU memory that are usable for tensors."""
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
) -> SearchResult:
    """Rank the layouts of ``world`` ranks of ``machine``; possibly none fits. ``progress`` reports each
    stage.

    Raises:
        ConfigError: the preflight rejects every layout.
    """
    queue = _Queue(config, args, world, machine, param_dtype, progress)
    result, verified = queue.result, 0
    for candidate in queue.fastest():
        if verified < _VERIFIED:
            progress(f"memory of {candidate.layout} measured in a fake step")
            peak = fake_peak(
                candidate.config, args, candidate.layout, candidate.memory, queue.stored, param_dtype
            )
            candidate = replace(candidate, peak=peak)
            verified += candidate.bytes <= result.capacity
        if candidate.bytes > result.capacity:
            result.reject("fit").add(candidate)
            continue
        result.ranked.append(candidate)
        if len(result.ranked) == top:
            break
    queue.reject_rest()
    return result


def _main_cost(candidate: Candidate, winner: Candidate) -> str:
    """Name the part of the step time in which ``candidate`` exceeds ``winner`` the most."""
    assert candidate.time and winner.time
    parts, least = (
        {"compute": it.compute, "bubble": it.bubble, **it.exposed} for it in (candidate.time, winner.time)
    )
    return max(parts, key=lambda name: parts[name] - least.get(name, 0.0))


def fits(config: Config, args: ModelArgs, world: int, machine: Machine, param_dtype: torch.dtype) -> bool:
    """Report whether the model is estimated to fit in any layout of ``world`` ranks."""
    queue = _Queue(config, args, world, machine, param_dtype, str)
    try:
        return any(it.bytes <= queue.result.capacity for it in queue.fastest())
    except ConfigError:
        return False


@dataclass
class _LayoutGroup:
    """Layouts with the same tp and pp: the remaining degrees of cp, and whether a layout tried so far
    ``fits``."""

    tp: int
    pp: int
    left: list[int]
    tried: list[tuple[Config, ParallelDims]] = field(default_factory=list)
    fits: bool = False


class _Queue:
    """Layouts in order of step time, evaluated lazily.

    Each layout's priority is a lower bound of its step time: first the time of its GEMMs and pipeline bubble,
    then the time without recomputation, finally the estimated step time.
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
        self.stored = state_bytes(self.config, args, param_dtype)
        self.result = SearchResult(usable_memory(machine))
        sizes = table(args).block_sizes
        self._blocks = sum(sizes) / max(sizes)  # of the largest ones, as many as have all elements
        self.result.states = self._blocks * sum(self.stored.whole_block) + sum(self.stored.whole_ends)
        self._hardware = Hardware("cuda", machine.name, machine.node, "bfloat16" in machine.peak, 9.0)
        self._problems: list[Problem] = []
        self._accepted = self._fitting = 0
        self._heap: list[tuple[float, float, int, Callable[[], Candidate | None], Candidate | None]] = []
        self._count = itertools.count()
        self._full: set[str] = set()  # keys of layouts that exceed memory with a smaller micro-batch

    def fastest(self) -> Iterator[Candidate]:
        """Yield the candidates estimated to fit, or nearly fit, fastest first.

        Raises:
            ConfigError: the preflight rejects every layout.
        """
        for tp in divisors(self.world):
            if self.machine.node % tp:
                self.result.reject("node").add()
                continue
            for pp in divisors(self.world // tp):
                self._next_cp(_LayoutGroup(tp, pp, divisors(self.world // (tp * pp))))
        while self._heap:
            _, _, _, look, _ = heapq.heappop(self._heap)
            if candidate := look():
                yield candidate
        if not self._accepted and self._problems:
            raise ConfigError(list({problem.key: problem for problem in self._problems}.values()))

    def reject_rest(self) -> None:
        """Count the remaining layouts as rejected."""
        for *_, candidate in self._heap:
            if candidate and candidate.bytes <= self.result.capacity:
                self.result.reject(_main_cost(candidate, self.result.ranked[0])).add(candidate)
            else:
                self.result.reject("fit" if candidate else "bound").add(candidate)

    def _push(
        self, seconds: float, look: Callable[[], Candidate | None], candidate: Candidate | None = None
    ) -> None:
        size = candidate.bytes if candidate else 0.0
        heapq.heappush(self._heap, (seconds, size, next(self._count), look, candidate))

    def _next_cp(self, group: _LayoutGroup) -> None:
        """Add the layouts of the next degree of cp, if any."""
        while group.left:
            cp, *group.left = group.left
            dp = self.world // (group.tp * group.pp * cp)
            if self.config.training.global_batch_size % dp == 0:
                break
            self.result.reject("batch").add()
        else:
            return
        mesh = ParallelDims(group.pp, 1, dp, cp, group.tp)
        parameters, gradients, state = self.stored.whole_block
        training = self.config.training
        # A pipeline stores unsharded gradients, regardless of dp and cp, except those of experts.
        etp = group.tp if self.config.parallelism.expert_tensor_parallel_degree > 1 else 1
        split = max(group.tp, *(etp * it for it in expert_degrees(self.args, dp * cp * group.tp // etp)))
        whole = gradients / BYTES[training.dtype] * BYTES[training.mixed_precision_reduce]
        if group.pp > 1 and whole * self._blocks / (group.pp * split) > self.result.capacity:
            self.result.reject("fit").count += 1 + len(group.left)
            return
        if self.config.optimizer.early_step_in_backward:
            gradients = 0
        sharded = self._blocks * (parameters + gradients + state) / (mesh.tp * mesh.pp * mesh.cp)
        if training.enable_cpu_offload:
            sharded = 0.0

        def reject(name: str, count: int) -> None:
            self.result.reject(name).count += count

        node, capacity = self.machine.node, self.result.capacity
        for settings in layout_settings(self.config, self.args, mesh, node, sharded, capacity, reject):
            config = with_settings(self.config, settings)
            layout = degrees(config.parallelism, self.world)
            assert layout
            group.tried.append((config, layout))
            seconds = min_step_seconds(config, self.args, layout, self.machine, self.param_dtype)
            self._push(seconds, partial(self._without_recomputation, group, settings, config, layout))
        if group.left:
            # Queued after layouts without a bubble, whose estimates may already show that a smaller cp fits.
            alone = min_step_seconds(
                self.config, self.args, replace(mesh, pp=1), self.machine, self.param_dtype
            )
            self._push(alone * 1.0001, partial(self._larger_cp, group))

    def _larger_cp(self, group: _LayoutGroup) -> None:
        if self._fits(group):
            self.result.reject("needless cp").count += len(group.left)
        else:
            self._next_cp(group)

    def _fits(self, group: _LayoutGroup) -> bool:
        """Report whether a tried layout of the group fits; the likeliest are estimated first."""
        for whole in (True, False):
            for config, layout in [] if group.fits else group.tried:
                if self._is_rejected(config):
                    continue
                *others, none = checkpointing_settings(config)
                for choice in [none, *others]:
                    tried = with_settings(config, choice)
                    memory = estimate(tried, self.args, layout, self.stored, self.param_dtype, whole=whole)
                    if memory.bytes <= self.result.capacity:
                        group.fits = True
                        return True
        return group.fits

    def _without_recomputation(
        self, group: _LayoutGroup, settings: dict[str, Any], config: Config, layout: ParallelDims
    ) -> None:
        """Time a layout without recomputation, and add its variants with checkpointing."""
        choices = checkpointing_settings(config)
        if self._exceeds_memory(settings, choices[0]):
            self.result.reject("fit").add()
            return
        if self._is_rejected(config):
            return
        *others, none = choices
        time = self._time(with_settings(config, none), layout)
        for choice in others:
            self._push(time.seconds, partial(self._candidate, group, settings, choice, layout))
        self._candidate(group, settings, none, layout, time)

    def _candidate(
        self,
        group: _LayoutGroup,
        settings: dict[str, Any],
        choice: dict[str, Any],
        layout: ParallelDims,
        time: StepTime | None = None,
    ) -> None:
        """Add a layout with its checkpointing and step time, if it fits."""
        if self._exceeds_memory(settings, choice):
            self.result.reject("fit").add()
            return
        tried = with_settings(self.config, settings | choice)
        memory = estimate(tried, self.args, layout, self.stored, self.param_dtype)
        candidate = Candidate(tried, settings | choice, layout, memory)
        group.fits = group.fits or candidate.bytes <= self.result.capacity
        if candidate.bytes > self.result.capacity * _CLOSE:
            self._full.add(_key_without_sizes(settings, choice))
            self.result.reject("fit").add(candidate)
            return
        candidate = replace(candidate, time=time or self._time(tried, layout))
        self.result.timed += 1
        self.progress(f"memory and step time estimated for {self.result.timed} layouts that fit")
        self._push(candidate.seconds, lambda: candidate, candidate)

    def _time(self, config: Config, layout: ParallelDims) -> StepTime:
        from toolkit.planner.time import step_time

        self.progress(f"step time of {layout} estimated")
        return step_time(config, self.args, layout, self.machine, param_dtype=self.param_dtype)

    def _exceeds_memory(self, settings: dict[str, Any], choice: dict[str, Any]) -> bool:
        """Report whether a smaller micro-batch already exceeds memory."""
        return _key_without_sizes(settings, choice) in self._full

    def _is_rejected(self, config: Config) -> bool:
        """Report whether the preflight's layout rules reject ``config``; if so, count it."""
        config = with_settings(config, {"activation_checkpoint.mode": "none"})
        run = PlannedRun(config, self.world, self._hardware)
        problems = [problem for it in _layout_rules() for problem in it.check(run)]
        self._problems += problems
        self._accepted += not problems
        if problems:
            self.result.reject(problems[0].key, problems[0].rule).add()
        return bool(problems)


@functools.cache
def _layout_rules() -> list[Rule]:
    files = [importlib.import_module(f"toolkit.preflight.rules.{file}").__name__ for file in _LAYOUT_RULES]
    return [it for it in RULES.values() if it.check.__module__ in files]


def _key_without_sizes(settings: dict[str, Any], choice: dict[str, Any]) -> str:
    return str([it for it in (settings | choice).items() if it[0] not in SIZES])


def min_step_seconds(
    config: Config, args: ModelArgs, layout: ParallelDims, machine: Machine, param_dtype: torch.dtype
) -> float:
    """Return a lower bound of the step time: all GEMMs at the highest rate, and the pipeline bubble."""
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
