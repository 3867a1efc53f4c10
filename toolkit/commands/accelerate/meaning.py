"""The form in which each key of accelerate is explained, and parsers of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import did_you_mean, join_or

NO_TPU = "TPUs need separate APIs, those of torch_xla, which this toolkit does not use"


class Refused(Exception):
    """Raised for a value that has no equivalent in this toolkit."""

    def __init__(self, rule: str, fix: str):
        self.rule, self.fix = rule, fix
        super().__init__(rule)


@dataclass(frozen=True)
class Meaning:
    """The equivalent of a key, as ``settings`` of the TOML or variables of the ``launch``; and ``why``."""

    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)


Values = Mapping[str, Any]
"""The values of all keys that are given, with the counts of ``translate``: ``machines`` and ``replicas``."""
Rule = Callable[[Any, Values], Meaning]


def switch(value: Any) -> bool:
    """Parse a boolean in one of YAML's or accelerate's forms.

    Raises:
        Refused: it says neither.
    """
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": False}
    said = str(value).strip().lower()
    if said not in words:
        raise Refused("must be true or false", "write one of the two")
    return words[said]


def is_on(value: Any) -> bool:
    """Return whether a value enables something."""
    return bool(value) and str(value).strip().lower() not in ("false", "no", "off", "none", "0", "")


def number(value: Any, least: int = 1) -> int:
    """Parse an integer, also in a form such as 1e8, which YAML reads as a string.

    Raises:
        Refused: it is none, or below ``least``.
    """
    try:
        if isinstance(value, bool) or float(value) != int(float(value)) or int(float(value)) < least:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise Refused(f"must be a whole number of at least {least}", "write such a number") from None
    return int(float(value))


def word(value: Any, names: tuple[str, ...]) -> str:
    """Return the name in ``names`` that equals ``value``, ignoring case.

    Raises:
        Refused: it is none of them.
    """
    said = str(value).strip()
    if found := next((name for name in names if name.lower() == said.lower()), None):
        return found
    raise Refused(f"must be {join_or(names)}", did_you_mean(said, names, "write one of these"))


def gone(why: str) -> Rule:
    """Return the rule of a key that is not needed in this toolkit, whatever its value."""
    return lambda value, values: Meaning(why)


def off(reason: str, fix: str) -> Rule:
    """Return the rule of a key for an unsupported feature, which may only be disabled."""

    def rule(value: Any, values: Values) -> Meaning:
        if is_on(value):
            raise Refused(reason, fix)
        return Meaning(f"off; {reason}")

    return rule


def tpu() -> Rule:
    """Return the rule of a key for TPUs."""
    return off(NO_TPU, "remove it, and train on GPUs or CPUs")
