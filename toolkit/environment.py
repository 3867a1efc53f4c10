"""What environment variables ask of a launch: numbers, and the ranks to hear of."""

from __future__ import annotations

import math
from collections.abc import Mapping

from toolkit.errors import ConfigError, Problem


def environment_error(name: str, value: str, rule: str, fix: str = "") -> ConfigError:
    """A variable that cannot be what it is."""
    return ConfigError(
        Problem(rule, fix or f"set {name} to such a value, or unset it", name, value, "environment")
    )


def whole_number(
    environ: Mapping[str, str], name: str, default: int, least: int, most: float = math.inf
) -> int:
    """The number in ``name``, ``default`` where it is unset or empty.

    Raises:
        ConfigError: it is no whole number from ``least`` to ``most``.
    """
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or not least <= int(text) <= most:
        bounds = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        raise environment_error(name, text, f"{name} is a whole number {bounds}")
    return int(text)


def shown_ranks(environ: Mapping[str, str], world_size: int, default: str) -> list[int]:
    """Those ranks of LOG_RANK that there are, in ascending order; ``default`` is read where it is unset.

    Raises:
        ConfigError: it is no list of ranks, or has none of the ``world_size`` that there are.
    """
    shown = environ.get("LOG_RANK", "").strip() or default
    if not all(item.strip().isdecimal() for item in shown.split(",")):
        raise environment_error("LOG_RANK", shown, "LOG_RANK is a list of ranks such as 0,1")
    ranks = sorted({int(item) for item in shown.split(",") if int(item) < world_size})
    if not ranks:
        rule = f"none of the {world_size} ranks would be heard"
        raise environment_error("LOG_RANK", shown, rule, "name at least one that there is: they start at 0")
    return ranks
