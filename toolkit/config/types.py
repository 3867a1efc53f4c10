"""Building blocks of the schema: the base class of tables, number ranges, and marks on fields.

A mark states when a key, or one of its values, has no effect. The preflight then rejects or reports settings
that would otherwise be silently ignored.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Lt
from pydantic import (
    BaseModel,
    ConfigDict,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

MAX_LAYERS = 1000
"""Larger values are taken for typos; rules enumerate every layer."""
MAX_CLASSES = 100_000
"""Maximum number of classes, each of which has a name."""
MAX_SIZE = 2**31 - 1
"""Maximum dimension, vocabulary size or length."""
MAX_RANKS = 1_000_000
MAX_BATCH = 100_000_000
MAX_SECONDS = 1_000_000_000
"""Maximum timeout: clocks and sockets do not support much longer ones."""
MAX_INT = 2**53  # floats, as in JSON and TensorBoard, skip larger integers

Positive = Annotated[int, Interval(ge=1, le=MAX_INT)]
NonNegative = Annotated[int, Interval(ge=0, le=MAX_INT)]
AutoOrPositive = Literal[-1] | Positive
Layers = Annotated[int, Interval(ge=1, le=MAX_LAYERS)]
Size = Annotated[int, Interval(ge=1, le=MAX_SIZE)]
Degree = Annotated[int, Interval(ge=1, le=MAX_RANKS)]
AutoOrDegree = Literal[-1] | Degree
Seconds = Annotated[int, Interval(ge=1, le=MAX_SECONDS)]
BatchSize = Annotated[int, Interval(ge=1, le=MAX_BATCH)]
AutoOrBatchSize = Literal[-1] | BatchSize
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Momentum = Annotated[float, Interval(ge=0), Lt(1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
"""Name that a user chooses in a table of tables, ``dict[Name, SomeTable]``: a bare key of TOML."""

FLOAT8 = ("float8", "quantize.linear.float8")
"""Names of the float8 converter in torchtitan's releases."""

NONE = "None"
"""None in TOML and on the command line, which have no null."""


@dataclass(frozen=True)
class UnsupportedValues:
    """Marks ``values`` of a key or list that torchtitan supports and this toolkit does not, with a
    ``reason``."""

    values: tuple[Any, ...]
    reason: str

    def rejects(self, value: object) -> bool:
        return _contains(value, self.values)


@dataclass(frozen=True)
class LocalPath:
    """Marks a local path or, with ``storage``, also a URL of object storage; a corpus name is valid too."""

    storage: bool | Literal["read"] = False


@dataclass(frozen=True)
class OnlyWith:
    """Marks a key or table that is only read if the key ``switch`` has (or contains) one of ``values``.

    Alternatively, it is read if ``switch`` is a number larger than ``above``. A switch that starts with a dot
    is in the same table. If a key has several such marks, one must hold. A value that is set but not read is
    reported at startup; with ``rejected``, for keys that request something, it is an error.
    """

    switch: str
    values: tuple[Any, ...] = (True,)
    above: int | None = None
    rejected: bool = False

    def is_met(self, switch: Any) -> bool:
        if self.above is None:
            return _contains(switch, self.values)
        return switch is not None and switch > self.above

    def __str__(self) -> str:
        if self.above is not None:
            return f"{self.switch} above {self.above}"
        return f"{self.switch} = {' or '.join(json.dumps(value) for value in self.values)}"


@dataclass(frozen=True)
class Needs:
    """Marks a key that is only read under the condition ``what``, which is defined in
    :mod:`toolkit.preflight.rules.options` or is another key that must be set.

    If a key has several such marks, all must hold. ``rejected`` is as in :class:`OnlyWith`.
    """

    what: str
    rejected: bool = False


EXPERTS = Needs("a model with experts", rejected=True)
"""Marks a key of mixtures of experts."""


def _contains(value: object, values: tuple[Any, ...]) -> bool:
    """Return whether a value, or an item of a list, is one of ``values``."""
    return any(item in values for item in (value if isinstance(value, list) else [value]))


def _only_equal(value: object, annotation: object) -> bool:
    """Return whether ``value`` equals a value of a Literal but has another type, as ``True == 1``."""
    if typing.get_origin(annotation) is Literal:
        alike = [choice for choice in typing.get_args(annotation) if choice == value]
        return bool(alike) and type(value) not in map(type, alike)
    return any(_only_equal(value, inner) for inner in typing.get_args(annotation))


def allows_none(annotation: object) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


class UnknownValue(Exception):
    """Raised on reading a value that the user set to something invalid."""


class Table(BaseModel):
    """A TOML table. Values are not converted, except integers to floats."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    if not TYPE_CHECKING:  # where it would allow any name

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:  # removed by Config.without
                raise UnknownValue(name)
            return super().__getattr__(name)

    @field_validator("*", mode="before")
    @classmethod
    def _no_other_type(cls, value: object, info: ValidationInfo) -> object:
        if _only_equal(value, cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("has another type than the value that it equals")
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            key: None if value == NONE and key in fields and allows_none(fields[key].annotation) else value
            for key, value in data.items()
        }
