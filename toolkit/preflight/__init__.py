"""Every check of a run that needs no process group and no torch: ``python -m toolkit.preflight CONFIG.toml``.

Each rule is a function registered by ``@rule`` in one of the files of ``rules``.
A mistake in the config ends in exit code 2. A tokenizer, corpus or checkpoint that cannot be used ends
in 3 when nothing in the config itself is wrong.
"""

from __future__ import annotations

from collections.abc import Collection

from toolkit.config import Config
from toolkit.errors import ConfigError, Problem
from toolkit.hardware import Hardware, detect
from toolkit.preflight import rules
from toolkit.preflight.planned_run import RULES, PlannedRun, Rule
from toolkit.preflight.summary import describe, notes, summary

__all__ = ["check", "describe", "notes", "raise_problems", "rules_of", "summary"]


def check(config: Config, *, world_size: int, hardware: Hardware) -> list[Problem]:
    """Return every rule that ``config`` breaks on ``world_size`` ranks of ``hardware``."""
    return [problem for _, problem in _broken(PlannedRun(config, world_size, hardware))]


def raise_problems(
    config: Config,
    *,
    world_size: int,
    hardware: Hardware | None = None,
    only: Collection[str] = (),
    unread: tuple[str, ...] = (),
) -> None:
    """Check ``config``; without ``hardware``, for the devices that are here; ``only`` names rules. Of keys
    that begin with one of ``unread`` nothing is asked.

    Raises:
        ConfigError: a rule about the config itself is broken; it names the others as well.
        DataError, CheckpointError: only tokenizer, corpus or checkpoint cannot be used.
    """
    broken = _broken(PlannedRun(config, world_size, hardware or detect(config.training.device)), only)
    broken = [(rule, problem) for rule, problem in broken if not problem.key.startswith(unread)]
    problems = [problem for _, problem in broken]
    errors = [rule.error for rule, _ in broken]
    if ConfigError in errors:
        raise ConfigError(problems)
    if errors:
        raise errors[0]("\n".join(map(str, problems)))  # type: ignore[arg-type]  # ConfigError went above


def check_and_tell(config: Config, *, world_size: int, hardware: Hardware, tell: bool = True) -> None:
    """:func:`raise_problems`; then, where ``tell``, print what is about to run.

    Raises:
        ConfigError, DataError, CheckpointError: as :func:`raise_problems` does.
    """
    raise_problems(config, world_size=world_size, hardware=hardware)
    if not tell:
        return
    if config.job.print_config:
        print(config.to_toml())
    print(describe(config, world_size=world_size, hardware=hardware), flush=True)


def _broken(run: PlannedRun, only: Collection[str] = ()) -> list[tuple[Rule, Problem]]:
    chosen = [rule for rule in rules_of(run) if not only or rule.check.__name__ in only]
    return [(rule, problem) for rule in chosen for problem in rule.check(run)]


def rules_of(run: PlannedRun) -> list[Rule]:
    """The rules about ``run``, in the order of their files; first those that job.custom_import registers."""
    files = [file.__name__ for file in rules.load(run.config, run.hardware.device)]
    own = [rule for rule in RULES.values() if not rule.check.__module__.startswith(rules.__name__)]
    return own + [rule for file in files for rule in RULES.values() if rule.check.__module__ == file]
