"""Checks of a run that need neither a process group nor torch, by ``llama-toolkit preflight CONFIG.toml``.

Each rule is a function registered by ``@rule`` in a file of ``rules``. Errors in the config exit with code 2.
If the config itself is valid, an unusable tokenizer, corpus or checkpoint exits with code 3.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from toolkit.config import Config, InvalidSettings, load_config
from toolkit.config.phases import phase_after, run_phases
from toolkit.config.schema import replaced
from toolkit.config.types import UnknownValue
from toolkit.errors import ConfigError, Problem, ToolkitError
from toolkit.hardware import Hardware, detect
from toolkit.preflight import rules
from toolkit.preflight.planned_run import RULES, PlannedRun, Rule
from toolkit.preflight.start import Start
from toolkit.preflight.summary import describe, notes, summary

__all__ = ["check", "describe", "hardware_of", "load", "notes", "raise_problems", "rules_of", "summary"]


def load(argv: Sequence[str], check: Callable[[Config], object]) -> Config:
    """Load the config of ``argv``. Invalid settings are reported together with problems of the other
    settings, which ``check`` raises.

    Raises:
        ConfigError: See :func:`toolkit.config.load_config`.
    """
    try:
        return load_config(argv)
    except InvalidSettings as invalid:
        problems = invalid.problems
        if invalid.rest:
            try:
                check(invalid.rest)
            except UnknownValue:
                pass  # the checks themselves need an invalid value
            except ToolkitError as error:
                problems += [problem for problem in error.problems if problem not in problems]
        raise ConfigError(problems) from None


def hardware_of(config: Config) -> Hardware:
    """Detect the hardware of a run; if training.device is invalid, the hardware for "auto"."""
    return detect(config.training.device if config.knows("training.device") else "auto")


def check(config: Config, *, world_size: int, hardware: Hardware) -> list[Problem]:
    """Return the problems of ``config`` on ``world_size`` ranks of ``hardware``."""
    return [problem for _, problem in _broken(PlannedRun(config, world_size, hardware))]


def raise_problems(
    config: Config,
    *,
    world_size: int,
    hardware: Hardware | None = None,
    only: Collection[str] = (),
    unread: tuple[str, ...] = (),
) -> None:
    """Raise if ``config`` breaks a rule.

    Args:
        hardware: Devices to check for; None detects them.
        only: Names of rules to check; empty checks all.
        unread: Prefixes of keys whose problems are ignored.

    Raises:
        ConfigError: The config breaks a rule; includes the problems of tokenizer, corpus and checkpoint.
        DataError, CheckpointError: Only the tokenizer, corpus or checkpoint is unusable.
    """
    broken = _broken(PlannedRun(config, world_size, hardware or hardware_of(config)), only)
    broken = [(rule, problem) for rule, problem in broken if not problem.key.startswith(unread)]
    problems = [problem for _, problem in broken]
    errors = [rule.error for rule, _ in broken]
    if ConfigError in errors:
        raise ConfigError(problems)
    if errors:
        error = errors[0]("\n".join(map(str, problems)))  # type: ignore[arg-type]  # ConfigError went above
        error.problems = problems
        raise error


def check_and_print(config: Config, *, world_size: int, hardware: Hardware, show: bool = True) -> None:
    """Run :func:`raise_problems`; then, if ``show``, print a description of the run.

    Raises:
        ConfigError, DataError, CheckpointError: See :func:`raise_problems`.
    """
    raise_problems(config, world_size=world_size, hardware=hardware)
    if not show:
        return
    if config.job.print_config:
        print(config.to_toml())
    print(describe(config, world_size=world_size, hardware=hardware), flush=True)


def _broken(run: PlannedRun, only: Collection[str] = ()) -> list[tuple[Rule, Problem]]:
    broken: list[tuple[Rule, Problem]] = []
    for part, checked in _parts(run):
        for rule in checked:
            if not only or rule.check.__name__ in only:
                with suppress(UnknownValue):
                    found = [(rule, problem) for problem in rule.check(part)]
                    broken += [it for it in found if it not in broken]
    return broken


def _parts(run: PlannedRun) -> Iterator[tuple[PlannedRun, list[Rule]]]:
    """Yield what to check by which rules: the run or, if it has phases, their order and then each as a run.
    If their order is wrong, only the first one is checked."""
    config = run.config
    if not config.knows("phases") or not config.phases:
        yield run, rules_of(run)
        return
    of_phases = [rule for rule in rules_of(run) if rule.check.__module__ == f"{rules.__name__}.phases"]
    yield run, of_phases
    parts, resumed = [config.in_phase("")], ""
    with suppress(UnknownValue):
        if not any(rule.check(run) for rule in of_phases):
            parts = [phase.config for phase in run_phases(config)]
            resumed = phase_after(config, run.start.step).name
    for config in parts:
        part = replace(run, config=config)
        if config.phase != resumed:  # the checkpoint is not of this phase
            vars(part)["start"] = Start(replaced(config, ["checkpoint", "enable"], False), run.checkpoints)
        yield part, rules_of(part)


def rules_of(run: PlannedRun) -> list[Rule]:
    """Return the rules that apply to ``run``: those registered by job.custom_import, then the rest in file
    order."""
    files = [file.__name__ for file in rules.load(run.config, run.detected.device)]
    own = [rule for rule in RULES.values() if not rule.check.__module__.startswith(rules.__name__)]
    return own + [rule for file in files for rule in RULES.values() if rule.check.__module__ == file]
