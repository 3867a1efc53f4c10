"""The whole configuration as one value, and the list of its keys that everything else is made from."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PrivateAttr

from toolkit.config.finetune import Finetune
from toolkit.config.job import Checkpoint, Comm, Debug, Health, Job, MemoryEstimation, Metrics, Profiling
from toolkit.config.parallelism import ActivationCheckpoint, Compile, Parallelism, Quantize
from toolkit.config.refused import REFUSED
from toolkit.config.training import (
    Data,
    Loss,
    LRScheduler,
    Model,
    Optimizer,
    Training,
    Validation,
)
from toolkit.config.types import ActsWith, Table
from toolkit.config.values import format_toml

if TYPE_CHECKING:
    from toolkit.config.values import Setting

DEFAULT = "default"
NAME = "NAME"
"""Stands for the names that users give, in keys such as data.mixture.NAME.weight."""


class Config(Table):
    """Every setting of a run. Tables and keys are torchtitan 0.2's, and ours in the same manner.

    Two configs are equal when their values are, wherever the values came from.
    """

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    health: Health = Health()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    loss: Loss = Loss()
    training: Training = Training()
    data: Data = Data()
    finetune: Finetune = Finetune()
    parallelism: Parallelism = Parallelism()
    checkpoint: Annotated[Checkpoint, ActsWith("checkpoint.enable")] = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Annotated[Compile, ActsWith("compile.enable")] = Compile()
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    memory_estimation: MemoryEstimation = MemoryEstimation()
    validation: Annotated[Validation, ActsWith("validation.enable")] = Validation()
    debug: Debug = Debug()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _depths: dict[str, int] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # some values are lists

    @property
    def is_dry(self) -> bool:
        """Say if the run is described and not made."""
        return self.comm.mode == "fake_backend" or self.memory_estimation.enable

    def with_origins(self, settings: Mapping[str, Setting]) -> Config:
        """Return the same values knowing the ``settings``, by dotted key, that set them."""
        copy = self.model_copy()
        copy._origins = {key: setting.origin for key, setting in settings.items()}
        copy._depths = {key: setting.depth for key, setting in settings.items()}
        return copy

    def origin(self, key: str) -> str:
        """Say what set a dotted ``key``: "file.toml:12", "--training.seq_len" or "default"."""
        return self._origins.get(key, DEFAULT)

    def depth(self, key: str) -> float:
        """How far from the user a dotted ``key`` was set: 0 is a flag, 1 the config file, 2 and so on the
        files that it extends, infinity the default."""
        return self._depths.get(key, math.inf)

    def value(self, key: str) -> Any:
        """Return the value of a dotted ``key``."""
        value: Any = self
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value

    def present_fields(self) -> Iterator[Field]:
        """The keys that this config has: those of :func:`fields`, with the names given in place of NAME."""
        for table, of_table in groupby(fields(), key=lambda field: field.table):
            if table in named_tables():
                group = table.rpartition(".")[0]
                of_each = list(of_table)
                for name in self.value(group):
                    yield from (replace(field, key=f"{group}.{name}.{field.name}") for field in of_each)
            else:
                yield from of_table

    def to_toml(self, origins: bool = True) -> str:
        """Write every value, defaults too, as TOML that loads to an equal config.

        What another key has taken the place of is a comment: side by side in one file the two contradict.
        """
        gone = replaced(self)
        lines: list[str] = []
        table = ""
        for field in self.present_fields():
            if field.table != table:
                table = field.table
                lines += ["", f"[{table}]"]
            value = self.value(field.key)
            unset = value is None and field.default is None
            line = f"{field.name} = {'None' if unset else format_toml(value)}"
            line = f"# {line}" if unset or field.key in gone else line
            lines.append(f"{line}  # {self.origin(field.key)}" if origins else line)
        return "\n".join(lines[1:]) + "\n"


@dataclass(frozen=True)
class Field:
    """One key of the schema. ``marks`` are number ranges and the marks of ``types.py``."""

    key: str
    annotation: Any
    marks: tuple[Any, ...]
    default: Any
    description: str

    @property
    def table(self) -> str:
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


_ROOT, _ADDED = [Config], dict[str, dict[str, Any]]()


def root() -> type[Config]:
    """The class of configurations: :class:`Config`, or it with what job.custom_import has added."""
    return _ROOT[0]


def added(key: str) -> dict[str, Any]:
    """Objects that job.custom_import has registered, by the values of ``key`` that name them."""
    return _ADDED.setdefault(key, {})


def set_root(extended: type[Config]) -> None:
    """Have all configurations that are read from now on be of the class ``extended``."""
    _ROOT[0] = extended
    for listing in (fields, tables, named_tables, fields_by_key):
        listing.cache_clear()


@functools.cache
def fields() -> tuple[Field, ...]:
    """All keys, table by table; a table's own keys come before those of the tables inside it.

    The keys of a table of tables are there once, under ``NAME``.
    """
    return tuple(_walk(root(), ""))


@functools.cache
def tables() -> dict[str, type[Table]]:
    """Every table by its dotted name, "training.dataloader" too; "data.mixture.NAME" stands for any name."""
    return dict(_walk_tables(root(), ""))


@functools.cache
def named_tables() -> frozenset[str]:
    """The names of the tables whose last part the user chooses, as ``tables`` has them."""
    return frozenset(name for name in tables() if name.endswith(f".{NAME}"))


@functools.cache
def fields_by_key() -> dict[str, Field]:
    return {field.key: field for field in fields()}


def schema_name(key: str) -> str:
    """Return ``key`` as the schema has it: NAME in place of a name that the user gave."""
    for table in named_tables():
        group = table.removesuffix(NAME)
        if key.startswith(group):
            _, *rest = key.removeprefix(group).split(".", 1)
            return ".".join([table, *rest])
    return key


def find_field(key: str) -> Field | None:
    """Return the field of a key as a user writes it, one that is refused too, or None."""
    if key in REFUSED:
        default, reason = REFUSED[key]
        kind = {list: list[str], type(None): str | None}.get(type(default), type(default))
        return Field(key, kind, (), default, reason)
    found = fields_by_key().get(schema_name(key))
    return found and replace(found, key=key)


def find_table(name: str) -> type[Table] | None:
    """Return the table of a name as a user writes it, or None."""
    holds_refused = any(key.startswith(f"{name}.") for key in REFUSED)
    return tables().get(schema_name(name)) or (Table if holds_refused else None)


def is_group(name: str) -> bool:
    """Say if tables, and only they, stand in the table of this name."""
    return f"{name}.{NAME}" in named_tables()


def table_of(annotation: Any) -> type[Table] | None:
    """Return the class of a table, or of the tables in a table of tables, or None for a value."""
    if typing.get_origin(annotation) is dict:
        return table_of(typing.get_args(annotation)[1])
    return annotation if isinstance(annotation, type) and issubclass(annotation, Table) else None


def _walk(table: type[Table], prefix: str, marks: tuple[ActsWith, ...] = ()) -> Iterator[Field]:
    for name, info in table.model_fields.items():
        if table_of(info.annotation) is None:
            description = " ".join((info.description or "").split())
            own = [
                replace(mark, switch=prefix + mark.switch[1:])
                if isinstance(mark, ActsWith) and mark.switch.startswith(".")
                else mark
                for mark in info.metadata
            ]
            # A switch of the same table has the table's marks itself.
            within = any(isinstance(mark, ActsWith) and mark.switch.startswith(prefix) for mark in own)
            given = (*own, *(it for it in marks if not within and it.switch != prefix + name))
            yield Field(prefix + name, info.annotation, given, info.default, description)
    for name, inner, of_table in _inner(table):
        yield from _walk(inner, f"{prefix}{name}.", (*marks, *of_table))


def _walk_tables(table: type[Table], prefix: str) -> Iterator[tuple[str, type[Table]]]:
    for name, inner, _ in _inner(table):
        yield prefix + name, inner
        yield from _walk_tables(inner, f"{prefix}{name}.")


def _inner(table: type[Table]) -> Iterator[tuple[str, type[Table], list[ActsWith]]]:
    """The tables in a table, by name, with the marks of all their keys; of a table of tables, what stands
    under any name."""
    for name, info in table.model_fields.items():
        if inner := table_of(info.annotation):
            marks = [mark for mark in info.metadata if isinstance(mark, ActsWith)]
            yield name if inner is info.annotation else f"{name}.{NAME}", inner, marks


PAIRS = {
    "training.steps": "training.epochs",
    "lr_scheduler.warmup_steps": "lr_scheduler.warmup_ratio",
}
"""Keys, and the other keys for the same thing."""

ONE_CORPUS = tuple(
    f"training.{name}"
    for name in ("dataset", "dataset_path", "dataset_subset", "dataset_split", "format", "columns")
)
"""The keys that [data.mixture] takes the place of."""


def is_set(config: Config, key: str) -> bool:
    """Say if a value is not the default: the config that a run saves names every key."""
    return bool(config.value(key) != fields_by_key()[key].default)


def replaced(config: Config) -> frozenset[str]:
    """The keys that give way to others which were set nearer to the user; as near, they contradict."""
    pairs = {
        key
        for key, other in PAIRS.items()
        if is_set(config, key) and is_set(config, other) and config.depth(other) < config.depth(key)
    }
    corpus = {key for key in ONE_CORPUS if is_set(config, key) and mixture_depth(config) < config.depth(key)}
    return frozenset(pairs | corpus)


def without_replaced(config: Config) -> Config:
    """``config`` without epochs, or the ratio of a warm-up, over which steps are given. Where it is the other
    way round, nothing reads the steps, which stay to be told."""
    for key, other in PAIRS.items():
        if is_set(config, other) and config.depth(key) < config.depth(other):
            table, _, name = other.partition(".")
            cleared = getattr(config, table).model_copy(update={name: None})
            config = config.model_copy(update={table: cleared})
    return config


def mixture_depth(config: Config) -> float:
    """How far from the user the nearest key of [data.mixture] was set; infinity without one."""
    keys = [field.key for field in config.present_fields() if field.key.startswith("data.mixture.")]
    return min(map(config.depth, keys), default=math.inf)
