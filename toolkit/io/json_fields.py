"""JSON files that others wrote, and all that is wrong with their fields in one message. No torch."""

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
"""Limit of a JSON file: some ten times those of the largest tokenizers and indexes there are."""


def is_count(value: object, *, at_most: int = 2**63 - 1) -> bool:
    """Say if a value of JSON is a positive whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= at_most


def is_size(value: object) -> bool:
    """Say if a value of JSON is a whole number from 0 on."""
    return value == 0 and not isinstance(value, bool | float) or is_count(value)


def is_positive(value: object) -> bool:
    """Say if a value of JSON is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse a text as JSON; ``pairs`` makes its objects.

    Raises:
        ValueError: it is no JSON, or nested too deep, or not UTF-8, or has an integer of too many digits.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_object(content: str | bytes, path: Path) -> dict[str, Any]:
    """The JSON object that ``content``, read from ``path``, says.

    Raises:
        DataError: it says something else.
    """
    try:
        found = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object")
    return found


def read_object(path: Path, *, at_most: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataError: there is no such file, or it holds something else, or more bytes than ``at_most``.
    """
    try:
        content = read_bytes(path, at_most=at_most)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    return parse_object(content, path)


def read_if_there(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file.

    Raises:
        DataError: it is something else.
    """
    return read_object(path) if os.path.lexists(path) else {}


class Fields:
    """The fields of an object, taken one by one; what is wrong with them is raised by :meth:`finish`.

    A field that is null counts as absent. ``where`` is put before names in messages ("rope_scaling.").
    """

    def __init__(self, values: dict[str, Any], *, where: str = "", wrong: list[str] | None = None):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.where = where
        self.wrong = [] if wrong is None else wrong

    def inner(self, key: str) -> Fields | None:
        """The object in a field, whose mistakes count among these; None where it is absent or empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.refuse(key, "must be an object")
        found = value if isinstance(value, dict) else {}
        return Fields(found, where=f"{self.where}{key}.", wrong=self.wrong) if found else None

    def count(self, key: str, default: int | None = None, *, at_most: int = MAX_SIZE) -> int:
        """A positive whole number."""
        value, rule = self.values.get(key), "must be a positive whole number"
        if is_count(value) and not is_count(value, at_most=at_most):
            rule = f"must be at most {at_most:,}"
        return int(self._take(key, default, is_count(value, at_most=at_most), rule))

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        return float(self._take(key, default, is_positive(self.values.get(key)), "must be a positive number"))

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        return bool(self._take(key, default, isinstance(self.values.get(key), bool), "must be true or false"))

    def refuse(self, key: str, rule: str) -> None:
        """Remember that the value of a field breaks a rule."""
        said = f" = {quote(self.values[key], json.dumps)}" if key in self.values else ""
        self.wrong.append(f"{self.where}{key}{said}: {rule}")

    def finish(self, what: str) -> None:
        """Raise what was wrong, if anything was, under the heading ``what``."""
        if self.wrong:
            raise DataError("\n  ".join([f"{what}:", *self.wrong]))

    def _take(self, key: str, default: Any, valid: bool, rule: str) -> Any:
        if key in self.values:
            if valid:
                return self.values[key]
            self.refuse(key, rule)
        elif default is not None:
            return default
        else:
            self.wrong.append(f"{self.where}{key} is missing")
        return 1  # stands in until finish() raises


def check_heads(fields: Fields, *, heads: str, kv_heads: str, n_heads: int, n_kv_heads: int) -> None:
    """Refuse numbers of heads that are no grouped-query attention."""
    if n_heads % n_kv_heads:
        fields.refuse(kv_heads, f"must divide {heads}, which is {n_heads}")
