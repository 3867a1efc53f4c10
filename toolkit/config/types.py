"""Parts that schema classes are made of: the base of every table, number ranges, and marks on fields.

A mark says where a key, or a value of it, does not act, so that the preflight can refuse or note what would
otherwise be ignored in silence.
"""

from __future__ import annotations

import json
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
"""Beyond it a model is a slip of the pen, of which every layer would be counted."""
MAX_CLASSES = 100_000
"""The most classes of a classifier, each of which has a name."""
MAX_SIZE = 2**31 - 1
"""The largest dimension, vocabulary or length."""
MAX_RANKS = 1_000_000
MAX_BATCH = 100_000_000
MAX_SECONDS = 1_000_000_000
"""The longest time-out: clocks and sockets take no more than some times as long."""
MAX_INT = 2**53  # beyond it a float, which JSON and TensorBoard have, skips integers

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
"""A user's name of a table in a table of tables, ``dict[Name, SomeTable]``: a bare key of TOML."""

FLOAT8 = ("float8", "quantize.linear.float8")
"""Names of the converter of linear layers to float8 in torchtitan's releases."""

NONE = "None"
"""How TOML and the command line, which have no null, write it for a key that may be None."""


@dataclass(frozen=True)
class RefusedValues:
    """Mark ``values`` of a key or a list that torchtitan has and this toolkit has not, for the ``reason``."""

    values: tuple[Any, ...]
    reason: str

    def refuses(self, value: object) -> bool:
        return _holds(value, self.values)


@dataclass(frozen=True)
class LocalPath:
    """A file or folder of this machine, or of ``storage``, or the name of a corpus."""

    storage: bool | Literal["read"] = False


@dataclass(frozen=True)
class ActsWith:
    """A key, or a table of keys, that is read only where the key ``switch`` is one of ``values``, or names
    one; or where it is given and ``above`` a number. A switch that begins with a dot is of the same table. Of
    several such marks one is enough. What is set and not read is noted at start-up, and ``refused`` where it
    asks for something."""

    switch: str
    values: tuple[Any, ...] = (True,)
    above: int | None = None
    refused: bool = False

    def acts(self, switch: Any) -> bool:
        if self.above is None:
            return _holds(switch, self.values)
        return switch is not None and switch > self.above

    def __str__(self) -> str:
        if self.above is not None:
            return f"{self.switch} above {self.above}"
        return f"{self.switch} = {' or '.join(json.dumps(value) for value in self.values)}"


@dataclass(frozen=True)
class Needs:
    """A key that is read only in a run that has ``what``: a fact of :mod:`toolkit.preflight.rules.options`,
    or a key that is given. Of several such marks all are needed. ``refused`` as in :class:`ActsWith`."""

    what: str
    refused: bool = False


def _holds(value: object, values: tuple[Any, ...]) -> bool:
    """Say if a value is one of ``values``, or a list with one."""
    return any(item in values for item in (value if isinstance(value, list) else [value]))


def _only_equal(value: object, annotation: object) -> bool:
    """Say if ``value`` is none of the values that a type names but equal to one, as true is to 1."""
    if typing.get_origin(annotation) is Literal:
        alike = [choice for choice in typing.get_args(annotation) if choice == value]
        return bool(alike) and type(value) not in map(type, alike)
    return any(_only_equal(value, inner) for inner in typing.get_args(annotation))


def allows_none(annotation: object) -> bool:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


class Table(BaseModel):
    """A TOML table. Values are taken as they are: only an integer may stand for a float."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_other_type(cls, value: object, info: ValidationInfo) -> object:
        if _only_equal(value, cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("of another type than the value that it equals")
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
