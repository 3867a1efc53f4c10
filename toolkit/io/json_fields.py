"""Validate JSON files, reporting all problems of their fields in one message. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.config.local_paths import read_bytes
from toolkit.config.types import MAX_SIZE
from toolkit.errors import DataError, quote

MAX_BYTES = 200_000_000
"""Maximum size of a JSON file, about ten times the largest known tokenizers and indexes."""


def is_count(value: object, *, at_most: int = 2**63 - 1) -> bool:
    """Return whether a JSON value is a positive integer, not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= at_most


def is_size(value: object) -> bool:
    """Return whether a JSON value is a nonnegative integer."""
    return value == 0 and not isinstance(value, bool | float) or is_count(value)


def is_positive(value: object) -> bool:
    """Return whether a JSON value is a positive finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON; ``pairs`` builds its objects.

    Raises:
        ValueError: it is not JSON or not UTF-8, is nested too deeply, or has an integer with too many digits.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_object(content: str | bytes, path: Path) -> dict[str, Any]:
    """Parse ``content``, read from ``path``, as a JSON object.

    Raises:
        DataError: it is not a JSON object.
    """
    try:
        value = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path} does not contain a JSON object")
    return value


def read_object(path: Path, *, at_most: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        DataError: the file is missing, larger than ``at_most`` bytes, or not a JSON object.
    """
    try:
        content = read_bytes(path, at_most=at_most)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return parse_object(content, path)


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist.

    Raises:
        DataError: the file does not contain a JSON object.
    """
    return read_object(path) if os.path.lexists(path) else {}


class Fields:
    """Validates the fields of an object; :meth:`finish` raises all problems at once.

    A null field counts as absent. ``where`` precedes names in messages ("rope_scaling.").
    """

    def __init__(self, values: dict[str, Any], *, where: str = "", problems: list[str] | None = None):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.where = where
        self.problems = [] if problems is None else problems

    def inner(self, key: str) -> Fields | None:
        """Return the object in a field, as Fields that share the list of problems; None if it is absent or
        empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.reject(key, "must be an object")
        found = value if isinstance(value, dict) else {}
        return Fields(found, where=f"{self.where}{key}.", problems=self.problems) if found else None

    def count(self, key: str, default: int | None = None, *, at_most: int = MAX_SIZE) -> int:
        """Return a positive integer."""
        value, rule = self.values.get(key), "must be a positive integer"
        if is_count(value) and not is_count(value, at_most=at_most):
            rule = f"must be at most {at_most:,}"
        return int(self._take(key, default, is_count(value, at_most=at_most), rule))

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        return float(self._take(key, default, is_positive(self.values.get(key)), "must be a positive number"))

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        return bool(self._take(key, default, isinstance(self.values.get(key), bool), "must be true or false"))

    def reject(self, key: str, rule: str) -> None:
        """Record that the value of a field breaks a rule."""
        value = f" = {quote(self.values[key], json.dumps)}" if key in self.values else ""
        self.problems.append(f"{self.where}{key}{value}: {rule}")

    def finish(self, heading: str) -> None:
        """Raise all problems, if any, below ``heading``."""
        if self.problems:
            raise DataError("\n  ".join([f"{heading}:", *self.problems]))

    def _take(self, key: str, default: Any, valid: bool, rule: str) -> Any:
        if key in self.values:
            if valid:
                return self.values[key]
            self.reject(key, rule)
        elif default is not None:
            return default
        else:
            self.problems.append(f"{self.where}{key} is missing")
        return 1  # a placeholder until finish() raises


def check_heads(fields: Fields, *, heads: str, kv_heads: str, n_heads: int, n_kv_heads: int) -> None:
    """Reject numbers of heads that do not form grouped-query attention."""
    if n_heads % n_kv_heads:
        fields.reject(kv_heads, f"must divide {heads}, which is {n_heads}")
