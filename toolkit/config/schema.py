"""The complete configuration, and the list of its keys, from which help, checks and files are derived."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import PrivateAttr

from toolkit.config.finetune import Finetune
from toolkit.config.job import Checkpoint, Comm, Debug, Health, Job, MemoryEstimation, Metrics, Profiling
from toolkit.config.optimizer import LRScheduler, Optimizer
from toolkit.config.parallelism import ActivationCheckpoint, Compile, Parallelism, Quantize
from toolkit.config.training import (
    Data,
    Distillation,
    Evaluation,
    Loss,
    Model,
    MoE,
    Phase,
    Training,
    Validation,
)
from toolkit.config.types import Name, OnlyWith, Table, UnknownValue
from toolkit.config.unsupported import UNSUPPORTED
from toolkit.config.values import format_toml

if TYPE_CHECKING:
    from toolkit.config.values import Setting

DEFAULT = "default"
NAME = "NAME"
"""Placeholder for the names that users choose, in keys such as data.mixture.NAME.weight."""


class Config(Table):
    """Every setting of a run. Tables and keys follow torchtitan 0.2; additional ones follow its style.

    Two configs are equal if their values are equal, regardless of origin.
    """

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    health: Health = Health()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    loss: Loss = Loss()
    distillation: Distillation = Distillation()
    moe: MoE = MoE()
    training: Training = Training()
    phases: dict[Name, Phase] = {}
    """Parts of the run with other lengths, batches or mixtures."""
    data: Data = Data()
    finetune: Finetune = Finetune()
    parallelism: Parallelism = Parallelism()
    checkpoint: Annotated[Checkpoint, OnlyWith("checkpoint.enable")] = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Annotated[Compile, OnlyWith("compile.enable")] = Compile()
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    memory_estimation: MemoryEstimation = MemoryEstimation()
    validation: Annotated[Validation, OnlyWith("validation.enable")] = Validation()
    evaluation: Evaluation = Evaluation()
    debug: Debug = Debug()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _depths: dict[str, int] = PrivateAttr(default_factory=dict)
    _phase: str | None = PrivateAttr(None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # some values are lists

    @property
    def is_dry(self) -> bool:
        """True if the run is only described, not executed."""
        return self.comm.mode == "fake_backend" or self.memory_estimation.enable

    @property
    def phase(self) -> str | None:
        """Name of the phase that this config describes, "" for the first; None if there are no phases."""
        return self._phase

    def in_phase(self, name: str) -> Config:
        """Return the config of one phase, without the other phases; "" is the first one."""
        copy: Config = replaced(self, ["phases"], {})
        copy._phase, copy._origins, copy._depths = name, dict(self._origins), dict(self._depths)
        for key, value in (self.phases[name].values() if name else {}).items():
            changed = {f"{_PHASE_TABLES.get(key, 'training')}.{key}": value}
            if key == "weights":  # a rule reports the other names
                known = self.data.mixture
                changed = {f"data.mixture.{it}.weight": weight for it, weight in value.items() if it in known}
            for target, new in changed.items():
                copy = replaced(copy, target.split("."), new)
                copy._origins[target] = self.origin(f"phases.{name}.{key}")
                copy._depths[target] = self._depths.get(f"phases.{name}.{key}", 0)
        return copy

    def with_origins(self, settings: Mapping[str, Setting]) -> Config:
        """Return a copy that records the origins of its values; ``settings`` maps dotted keys to settings."""
        copy = self.model_copy()
        copy._origins = {key: setting.origin for key, setting in settings.items()}
        copy._depths = {key: setting.depth for key, setting in settings.items()}
        return copy

    def origin(self, key: str) -> str:
        """Return where a dotted ``key`` was set: "file.toml:12", "--training.seq_len" or "default"."""
        return self._origins.get(key, DEFAULT)

    def depth(self, key: str) -> float:
        """Return how directly the user set a dotted ``key``.

        0 is a flag, 1 the config file, 2 and up a file that it extends, infinity the default.
        """
        return self._depths.get(key, math.inf)

    def value(self, key: str) -> Any:
        """Return the value of a dotted ``key``."""
        value: Any = self
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value

    def without(self, key: str) -> Config:
        """Return a copy in which reading ``key``, a value or a table, raises :class:`UnknownValue`."""
        return _without(self, key.split("."))

    def knows(self, key: str) -> bool:
        """Return whether the value of a dotted ``key`` can be read; see :meth:`without`."""
        try:
            self.value(key)
        except UnknownValue:
            return False
        return True

    def present_fields(self) -> Iterator[Field]:
        """Yield the fields of this config whose values are known, as in :func:`fields` but with the user's
        names instead of NAME."""
        for table, of_table in groupby(fields(), key=lambda field: field.table):
            if table in named_tables():
                group = table.rpartition(".")[0]
                names = self.value(group) if self.knows(group) else ()
                of_each = list(of_table)
                present = [replace(it, key=f"{group}.{name}.{it.name}") for name in names for it in of_each]
            else:
                present = list(of_table)
            yield from (field for field in present if self.knows(field.key))

    def to_toml(self, origins: bool = True) -> str:
        """Return all values, including defaults, as TOML that loads to an equal config.

        Overridden keys are written as comments, because they would contradict the keys that override them.
        """
        overridden = overridden_keys(self)
        lines: list[str] = []
        table = ""
        for field in self.present_fields():
            if field.table != table:
                table = field.table
                lines += ["", f"[{table}]"]
            value = self.value(field.key)
            unset = value is None and field.default is None
            line = f"{field.name} = {'None' if unset else format_toml(value)}"
            line = f"# {line}" if unset or field.key in overridden else line
            lines.append(f"{line}  # {self.origin(field.key)}" if origins else line)
        return "\n".join(lines[1:]) + "\n"


_PHASE_TABLES = {
    "rope_theta": "model",
    "rope_scaling_factor": "model",
    "context_parallel_degree": "parallelism",
}
"""Tables of the keys of a phase that are not of ``[training]``."""


def replaced(table: Table | Mapping[str, Any], path: list[str], value: object) -> Any:
    """Return a copy of a table with another value at ``path``."""
    name, *rest = path
    if rest:
        inner = table[name] if isinstance(table, Mapping) else getattr(table, name)
        value = replaced(inner, rest, value)
    return {**table, name: value} if isinstance(table, Mapping) else table.model_copy(update={name: value})


_AnyTable = TypeVar("_AnyTable", bound=Table)


def _without(table: _AnyTable, path: list[str]) -> _AnyTable:
    name, *rest = path
    copy = table.model_copy()
    inner = copy.__dict__.pop(name, None)
    if isinstance(inner, Table) and rest:
        copy.__dict__[name] = _without(inner, rest)
    elif isinstance(inner, dict) and len(rest) > 1 and rest[0] in inner:
        copy.__dict__[name] = inner | {rest[0]: _without(inner[rest[0]], rest[1:])}
    return copy


@dataclass(frozen=True)
class Field:
    """One key of the schema. ``marks`` are bounds and the marks of ``types.py``."""

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


_CONFIG_CLASS, _REGISTERED = [Config], dict[str, dict[str, Any]]()


def config_class() -> type[Config]:
    """Return the config class: :class:`Config`, or the extension that job.custom_import registered."""
    return _CONFIG_CLASS[0]


def registry(key: str) -> dict[str, Any]:
    """Return the objects that job.custom_import registered for ``key``, by the values that select them."""
    return _REGISTERED.setdefault(key, {})


def set_config_class(extended: type[Config]) -> None:
    """Set the class of all configs that are loaded from now on."""
    _CONFIG_CLASS[0] = extended
    for listing in (fields, tables, named_tables, fields_by_key):
        listing.cache_clear()


@functools.cache
def fields() -> tuple[Field, ...]:
    """Return all keys, table by table; a table's own keys come before those of nested tables.

    The keys of a table of tables appear once, under ``NAME``.
    """
    return tuple(_walk(config_class(), ""))


@functools.cache
def tables() -> dict[str, type[Table]]:
    """Return every table by dotted name, including nested ones; "data.mixture.NAME" stands for any name."""
    return dict(_walk_tables(config_class(), ""))


@functools.cache
def named_tables() -> frozenset[str]:
    """Return the names of tables whose last part the user chooses, as in :func:`tables`."""
    return frozenset(name for name in tables() if name.endswith(f".{NAME}"))


@functools.cache
def fields_by_key() -> dict[str, Field]:
    return {field.key: field for field in fields()}


def schema_name(key: str) -> str:
    """Return ``key`` with NAME instead of a name that the user chose."""
    for table in named_tables():
        group = table.removesuffix(NAME)
        if key.startswith(group):
            _, *rest = key.removeprefix(group).split(".", 1)
            return ".".join([table, *rest])
    return key


def find_field(key: str) -> Field | None:
    """Return the field of ``key``, supported or not, or None."""
    if key in UNSUPPORTED:
        default, reason = UNSUPPORTED[key]
        kind = {list: list[str], type(None): str | None}.get(type(default), type(default))
        return Field(key, kind, (), default, reason)
    field = fields_by_key().get(schema_name(key))
    return field and replace(field, key=key)


def find_table(name: str) -> type[Table] | None:
    """Return the table of a name, or None."""
    is_unsupported = any(key.startswith(f"{name}.") for key in UNSUPPORTED)
    return tables().get(schema_name(name)) or (Table if is_unsupported else None)


def is_group(name: str) -> bool:
    """Return whether the table of this name contains only tables with names that users choose."""
    return f"{name}.{NAME}" in named_tables()


def table_of(annotation: Any) -> type[Table] | None:
    """Return the class of a table, or of the tables in a table of tables; None for a value."""
    if typing.get_origin(annotation) is dict:
        return table_of(typing.get_args(annotation)[1])
    return annotation if isinstance(annotation, type) and issubclass(annotation, Table) else None


def _walk(table: type[Table], prefix: str, marks: tuple[OnlyWith, ...] = ()) -> Iterator[Field]:
    for name, info in table.model_fields.items():
        if table_of(info.annotation) is None:
            description = " ".join((info.description or "").split())
            own = [
                replace(mark, switch=prefix + mark.switch[1:])
                if isinstance(mark, OnlyWith) and mark.switch.startswith(".")
                else mark
                for mark in info.metadata
            ]
            # A switch in the same table already has the table's marks.
            within = any(isinstance(mark, OnlyWith) and mark.switch.startswith(prefix) for mark in own)
            given = (*own, *(it for it in marks if not within and it.switch != prefix + name))
            yield Field(prefix + name, info.annotation, given, info.default, description)
    for name, inner, of_table in _inner(table):
        yield from _walk(inner, f"{prefix}{name}.", (*marks, *of_table))


def _walk_tables(table: type[Table], prefix: str) -> Iterator[tuple[str, type[Table]]]:
    for name, inner, _ in _inner(table):
        yield prefix + name, inner
        yield from _walk_tables(inner, f"{prefix}{name}.")


def _inner(table: type[Table]) -> Iterator[tuple[str, type[Table], list[OnlyWith]]]:
    """Yield the nested tables by name with their marks; for a table of tables, the class of its tables."""
    for name, info in table.model_fields.items():
        if inner := table_of(info.annotation):
            marks = [mark for mark in info.metadata if isinstance(mark, OnlyWith)]
            yield name if inner is info.annotation else f"{name}.{NAME}", inner, marks


ALTERNATIVES = {"training.steps": "training.epochs", "lr_scheduler.warmup_steps": "lr_scheduler.warmup_ratio"}
"""Keys, and the keys that set the same thing in another way."""

SINGLE_CORPUS_KEYS = tuple(
    f"training.{name}"
    for name in ("dataset", "dataset_path", "dataset_subset", "dataset_split", "format", "columns")
)
"""The keys that [data.mixture] replaces."""


def is_set(config: Config, key: str) -> bool:
    """Return whether the value of a key is known and not the default (a saved config contains every key)."""
    return config.knows(key) and bool(config.value(key) != fields_by_key()[schema_name(key)].default)


def overridden_keys(config: Config) -> frozenset[str]:
    """Return the keys overridden by alternatives set at a smaller depth; at equal depth they contradict."""
    pairs = {
        key
        for key, other in ALTERNATIVES.items()
        if is_set(config, key) and is_set(config, other) and config.depth(other) < config.depth(key)
    }
    depth = mixture_depth(config)
    corpus = {key for key in SINGLE_CORPUS_KEYS if is_set(config, key) and depth < config.depth(key)}
    return frozenset(pairs | corpus)


def clear_overridden(config: Config) -> Config:
    """Return ``config`` without the epochs or warmup ratio that steps override.

    Overridden steps are kept: nothing reads them, and they are reported.
    """
    for key, other in ALTERNATIVES.items():
        if is_set(config, other) and config.depth(key) < config.depth(other):
            table, _, name = other.partition(".")
            cleared = getattr(config, table).model_copy(update={name: None})
            config = config.model_copy(update={table: cleared})
    return config


def mixture_depth(config: Config) -> float:
    """Return how directly the user set the closest key of [data.mixture]; infinity without one."""
    keys = [field.key for field in config.present_fields() if field.key.startswith("data.mixture.")]
    return min(map(config.depth, keys), default=math.inf)
