"""What a user probably meant by a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from toolkit.config.schema import fields_by_key, tables
from toolkit.errors import Problem

RENAMED = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "job.print_args": "job.print_config",
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "validation.enabled": "validation.enable",
    "float8": "quantize.linear.float8",
}
"""Keys and tables of older torchtitan releases whose new name does not look like the old one."""


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that looks most like ``name``, if any does, whatever the case."""
    lowered = {candidate.lower(): candidate for candidate in names}
    found = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return a fix: the closest of ``names``, else ``otherwise``."""
    found = closest(name, names)
    return f"did you mean {found}?" if found else otherwise


def unknown_key(key: str, value: object, origin: str) -> Problem:
    """Describe a dotted key, or a table, that the schema does not have."""
    table, _, name = key.rpartition(".")
    if isinstance(value, dict):
        names: list[str] = list(tables())
        rule = f"there is no table [{key}]"
        otherwise = f"the tables are {', '.join(names)}"
    elif table in tables():
        names = [field.name for field in fields_by_key().values() if field.table == table]
        rule = f"[{table}] has no key {name}"
        otherwise = f"leave it out; --help {table} lists the keys of [{table}]"
    else:
        names = list(fields_by_key())
        rule = (
            f"there is no table [{table}]" if table else f"every key stands in a table, but {name} does not"
        )
        otherwise = "leave it out; --help lists the tables"
    return Problem(rule, _fix(key, name, table, names, otherwise), key, value, origin)


def _fix(key: str, name: str, table: str, names: list[str], otherwise: str) -> str:
    if key in RENAMED:
        return f"did you mean {RENAMED[key]}?"
    found = closest(name if table in tables() else key, names)
    if found:
        return f"did you mean {f'{table}.{found}' if table in tables() and found in names else found}?"
    elsewhere = [other for other in fields_by_key() if other.rpartition(".")[2] == name]
    return f"did you mean {' or '.join(elsewhere)}?" if elsewhere else otherwise
