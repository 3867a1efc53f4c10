"""The layouts of a world, fastest first: which fit, how long a step takes on each, and why the others lose.

Memory is reckoned (:mod:`toolkit.planner.estimate`) for those layouts of :mod:`toolkit.planner.layouts` that
the preflight accepts, then time (:mod:`toolkit.planner.time`) for those that fit. The best are run as fake
steps, and those of them that do not fit fall out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from toolkit import preflight
from toolkit.config import Config
from toolkit.errors import ConfigError, Problem, divisors
from toolkit.hardware import Hardware
from toolkit.metrics.flops import model_flops
from toolkit.models.common.args import ModelArgs
from toolkit.models.parameters import table
from toolkit.parallel.dims import ParallelDims, degrees
from toolkit.parallel.pipeline_schedules import bubble, pipeline_stages
from toolkit.planner.estimate import Estimate, Stored, estimate, fake_peak, samples, stored_bytes
from toolkit.planner.layouts import SIZES, checkpointing_of, fixed_batch, settings_of, with_settings
from toolkit.planner.machines import Machine
from toolkit.planner.rates import Rates
from toolkit.preflight.planned_run import PlannedRun

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
    *("mesh", "batch", "tensor_context_parallel", "pipeline", "fsdp"),
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
    from toolkit.planner.time import step_time

    found = Found(room(machine))
    config = fixed_batch(config, world)
    stored = stored_bytes(config, args, param_dtype)
    found.states = args.n_layers * sum(stored.whole_block) + sum(stored.whole_ends)
    fitting: list[Candidate] = []
    candidates = _candidates(config, args, world, machine, stored, param_dtype, found)
    for tried, candidate in enumerate(candidates, start=1):
        if candidate.bytes > found.room * _CLOSE:
            found.lose("fit").add(candidate)
        else:
            fitting.append(candidate)
        progress(f"memory estimated for {tried} layouts, of which {len(fitting)} fit")
    flops = model_flops(args, config.finetune, seq_len=0)
    bounds = sorted((_bound(it, args, machine, param_dtype, flops), n) for n, it in enumerate(fitting))
    ranked: list[Candidate] = []
    for bound, number in bounds:
        if len(ranked) >= top and bound > ranked[top - 1].seconds:
            break
        candidate = fitting[number]
        took = step_time(candidate.config, args, candidate.layout, machine, param_dtype=param_dtype)
        ranked.append(replace(candidate, time=took))
        ranked.sort(key=lambda it: it.key)
        found.timed += 1
        progress(f"step time estimated for {found.timed} of {len(fitting)} layouts that fit")
    if rest := len(fitting) - found.timed:
        found.lose("bound").count += rest
    _verify(ranked, args, param_dtype, found, top, progress)
    return found


def _verify(
    ranked: Sequence[Candidate],
    args: ModelArgs,
    param_dtype: torch.dtype,
    found: Found,
    top: int,
    progress: Callable[[str], object],
) -> None:
    """Take the first ones that fit, the best of them by a fake step."""
    verified = 0
    for candidate in ranked:
        if len(found.ranked) < top and verified < _VERIFIED:
            progress(f"memory of {candidate.layout} measured in a fake step")
            peak = fake_peak(candidate.config, args, candidate.layout, candidate.memory, param_dtype)
            candidate = replace(candidate, peak=peak)
            verified += candidate.bytes <= found.room
        if candidate.bytes > found.room:
            found.lose("fit").add(candidate)
        elif len(found.ranked) < top:
            found.ranked.append(candidate)
        else:
            found.lose(_why(candidate, found.ranked[0])).add(candidate)


def _why(loser: Candidate, winner: Candidate) -> str:
    """Name the part of a step of which the ``loser`` has more than the ``winner``."""
    assert loser.time and winner.time
    parts, least = (
        {"compute": it.compute, "bubble": it.bubble, **it.exposed} for it in (loser.time, winner.time)
    )
    return max(parts, key=lambda name: parts[name] - least.get(name, 0.0))


def fits(config: Config, args: ModelArgs, world: int, machine: Machine, param_dtype: torch.dtype) -> bool:
    """Say if the model fits on some layout of ``world`` ranks, by the estimate."""
    config = fixed_batch(config, world)
    stored, found = stored_bytes(config, args, param_dtype), Found(room(machine))
    try:
        tried = _candidates(config, args, world, machine, stored, param_dtype, found)
        return any(it.bytes <= found.room for it in tried)
    except ConfigError:
        return False


def _candidates(
    config: Config,
    args: ModelArgs,
    world: int,
    machine: Machine,
    stored: Stored,
    param_dtype: torch.dtype,
    found: Found,
) -> Iterator[Candidate]:
    hardware = Hardware("cuda", machine.name, machine.node, "bfloat16" in machine.peak, 9.0)
    problems: list[Problem] = []

    def lose(name: str, count: int) -> None:
        found.lose(name).count += count

    some = False
    parameters, gradients, state = stored.whole_block
    if config.optimizer.early_step_in_backward:
        gradients = 0
    least = args.n_layers * (parameters + gradients + state)  # without embedding and head
    if config.training.enable_cpu_offload:
        least = 0
    full: set[str] = set()  # layouts with their checkpointing that a smaller micro-batch has filled
    for tp in divisors(world):
        if machine.node % tp:
            found.lose("node").add()
            continue
        for pp in divisors(world // tp):
            for cp in divisors(world // (tp * pp)):
                fitted = False
                dp = world // (tp * pp * cp)
                if config.training.global_batch_size % dp:
                    found.lose("batch").add()
                    continue
                mesh, held = ParallelDims(pp, 1, dp, cp, tp), least / (tp * pp * cp)
                for settings in settings_of(config, args, mesh, machine.node, held, found.room, lose):
                    alike = str([it for it in settings.items() if it[0] not in SIZES])
                    asked = with_settings(config, settings)
                    choices = checkpointing_of(asked)
                    if f"{alike}{choices[0]}" in full:
                        found.lose("fit").add()
                        continue
                    broken = _broken(asked, world, hardware)
                    if broken:
                        problems += broken
                        found.lose(broken[0].key, broken[0].rule).add()
                        continue
                    some = True
                    layout = degrees(asked.parallelism, world)
                    assert layout
                    for choice in choices:
                        tried = with_settings(asked, choice)
                        if f"{alike}{choice}" in full:
                            found.lose("fit").add()
                            break
                        memory = estimate(tried, args, layout, stored, param_dtype)
                        fitted = fitted or memory.bytes <= found.room
                        yield Candidate(tried, settings | choice, layout, memory)
                        if memory.bytes > found.room * _CLOSE:
                            full.add(f"{alike}{choice}")
                            break
                if fitted:
                    found.lose("needless cp").count += sum(it > cp for it in divisors(world // (tp * pp)))
                    break
    if not some and problems:
        raise ConfigError(_distinct(problems))


def _broken(config: Config, world: int, hardware: Hardware) -> list[Problem]:
    """Problems that the preflight's rules about layouts find, whatever the checkpointing."""
    run = PlannedRun(with_settings(config, {"activation_checkpoint.mode": "none"}), world, hardware)
    rules = [it for it in preflight.rules_of(run) if it.check.__module__.rpartition(".")[2] in _LAYOUT_RULES]
    return [problem for it in rules for problem in it.check(run)]


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    return list({problem.key: problem for problem in problems}.values())


def _bound(
    candidate: Candidate, args: ModelArgs, machine: Machine, param_dtype: torch.dtype, flops: float
) -> float:
    """Seconds that a step takes at least: all products, of ``flops`` a token, at the best rate, and the
    pipeline's bubble."""
    config, layout = candidate.config, candidate.layout
    if config.activation_checkpoint.mode == "full" and not config.finetune.chooses:
        flops += 2 * sum(table(args).block_sizes)
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
    return flops * tokens / (reached * layout.world_size) / (1 - waits)
