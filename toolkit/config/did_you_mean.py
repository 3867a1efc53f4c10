"""Suggestions for unknown keys and tables."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.config.schema import fields_by_key, find_field, find_table, is_group, tables
from toolkit.config.values import takes_pairs
from toolkit.errors import Problem, closest

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
"""Keys and tables of older torchtitan releases with new names that do not look similar."""


def unknown_key(key: str, value: object, origin: str) -> Problem:
    """Describe a dotted key or table that the schema does not have."""
    table, _, name = key.rpartition(".")
    meant = " or ".join(meant_keys(key, value))
    if find_table(key) or is_group(key):
        rule = f"{key} is a table"
        return Problem(rule, f"set one of its keys; --help {key} lists them", key, value, origin)
    if isinstance(value, dict):
        rule = f"there is no table [{key}]"
        otherwise = f"the tables are {', '.join(tables())}"
    elif find_table(table):
        rule = f"[{table}] has no key {name}"
        otherwise = f"remove it; --help {table} lists the keys of [{table}]"
    elif (field := find_field(table)) and takes_pairs(field.annotation):
        rule = f"{table} must be set in one flag"
        return Problem(rule, f"write --{table} {name}={value}, more pairs after commas", key, value, origin)
    elif table:
        rule = f"there is no table [{table}]"
        otherwise = f"the tables are {', '.join(tables())}"
    else:
        rule = f"every key belongs to a table, but {name!r} does not"
        otherwise = "remove it; --help lists all keys"
    return Problem(rule, f"did you mean {meant}?" if meant else otherwise, key, value, origin)


def meant_keys(key: str, value: object) -> list[str]:
    """Return the keys, or the table, that ``key`` probably means; none if it exists or resembles no key."""
    table, _, name = key.rpartition(".")
    elsewhere = [other for other in fields_by_key() if other.rpartition(".")[2] == name]
    if find_field(key):
        return []
    if key in RENAMED:
        return [RENAMED[key]]
    if isinstance(value, dict):
        return _closest(key, tables())
    if table_class := find_table(table):
        return [f"{table}.{near}" for near in _closest(name, table_class.model_fields)] or elsewhere
    near = _closest(key, fields_by_key())
    return near or elsewhere if table else elsewhere or near


def _closest(name: str, names: Iterable[str]) -> list[str]:
    near = closest(name, names)
    return [near] if near else []
