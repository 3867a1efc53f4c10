"""The whole configuration as one value, and the list of its keys that everything else is made from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import PrivateAttr

from toolkit.config.fields import Table
from toolkit.config.tables_parallel import ActivationCheckpoint, Compile, Parallelism, Quantize
from toolkit.config.tables_run import (
    Checkpoint,
    Comm,
    Debug,
    Experimental,
    FaultTolerance,
    Job,
    MemoryEstimation,
    Metrics,
    Profiling,
)
from toolkit.config.tables_training import (
    Data,
    LRScheduler,
    Model,
    Optimizer,
    Training,
    Validation,
)
from toolkit.config.values import format_toml

DEFAULT = "default"


class Config(Table):
    """Every setting of a run. Tables and keys are torchtitan 0.2's, and ours in the same manner.

    Two configs are equal when their values are, wherever the values came from.
    """

    job: Job = Job()
    profiling: Profiling = Profiling()
    metrics: Metrics = Metrics()
    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    training: Training = Training()
    data: Data = Data()
    parallelism: Parallelism = Parallelism()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    comm: Comm = Comm()
    memory_estimation: MemoryEstimation = MemoryEstimation()
    fault_tolerance: FaultTolerance = FaultTolerance()
    experimental: Experimental = Experimental()
    validation: Validation = Validation()
    debug: Debug = Debug()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]  # some values are lists

    def with_origins(self, origins: Mapping[str, str]) -> Config:
        """Return the same values knowing that ``origins`` (dotted key → file:line or flag) set them."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy

    def origin(self, key: str) -> str:
        """Say what set a dotted ``key``: "file.toml:12", "--training.seq_len" or "default"."""
        return self._origins.get(key, DEFAULT)

    def value(self, key: str) -> Any:
        """Return the value of a dotted ``key``."""
        return functools.reduce(getattr, key.split("."), self)

    def to_toml(self, origins: bool = True) -> str:
        """Write every value, defaults too, as TOML that loads to an equal config."""
        lines: list[str] = []
        table = ""
        for field in fields():
            if field.table != table:
                table = field.table
                lines += ["", f"[{table}]"]
            value = self.value(field.key)
            unset = value is None and field.default is None
            line = f"# {field.name} = None" if unset else f"{field.name} = {format_toml(value)}"
            lines.append(f"{line}  # {self.origin(field.key)}" if origins else line)
        return "\n".join(lines[1:]) + "\n"


@dataclass(frozen=True)
class Field:
    """One key of the schema. ``marks`` are number ranges and the marks of ``fields.py``."""

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


@functools.cache
def fields() -> tuple[Field, ...]:
    """All keys, table by table; a table's own keys come before those of the tables inside it."""
    return tuple(_walk(Config, ""))


@functools.cache
def tables() -> dict[str, type[Table]]:
    """Every table by its dotted name, "training.dataloader" too."""
    return dict(_walk_tables(Config, ""))


@functools.cache
def fields_by_key() -> dict[str, Field]:
    return {field.key: field for field in fields()}


def is_table(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Table)


def _walk(table: type[Table], prefix: str) -> Iterator[Field]:
    for name, info in table.model_fields.items():
        if not is_table(info.annotation):
            description = " ".join((info.description or "").split())
            yield Field(prefix + name, info.annotation, tuple(info.metadata), info.default, description)
    for name, info in table.model_fields.items():
        if is_table(info.annotation):
            yield from _walk(info.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]


def _walk_tables(table: type[Table], prefix: str) -> Iterator[tuple[str, type[Table]]]:
    for name, info in table.model_fields.items():
        if is_table(info.annotation):
            yield prefix + name, info.annotation  # type: ignore[misc]
            yield from _walk_tables(info.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
