"""Fields of a JSON file that others wrote, and all that is wrong with them in one message. No torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from toolkit.errors import DataError


def is_count(value: object) -> bool:
    """Whether a value of JSON is a positive whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_positive(value: object) -> bool:
    """Whether a value of JSON is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DataError: there is no such file, or it holds something else.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object")
    return found


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

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        return int(
            self._take(key, default, is_count(self.values.get(key)), "must be a positive whole number")
        )

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        return float(self._take(key, default, is_positive(self.values.get(key)), "must be a positive number"))

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        return bool(self._take(key, default, isinstance(self.values.get(key), bool), "must be true or false"))

    def refuse(self, key: str, rule: str) -> None:
        """Remember that the value of a field breaks a rule."""
        said = f" = {json.dumps(self.values[key])}" if key in self.values else ""
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
