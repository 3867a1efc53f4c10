"""Suggestions for unknown keys and tables."""

from __future__ import annotations

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
    if find_table(key) or is_group(key):
        rule = f"{key} is a table"
        return Problem(rule, f"set one of its keys; --help {key} lists them", key, value, origin)
    if isinstance(value, dict):
        rule = f"there is no table [{key}]"
        meant = closest(key, tables())
        otherwise = f"the tables are {', '.join(tables())}"
    elif table_class := find_table(table):
        rule = f"[{table}] has no key {name}"
        near = closest(name, table_class.model_fields)
        meant = f"{table}.{near}" if near else _elsewhere(name)
        otherwise = f"remove it; --help {table} lists the keys of [{table}]"
    elif (field := find_field(table)) and takes_pairs(field.annotation):
        rule = f"{table} must be set in one flag"
        return Problem(rule, f"write --{table} {name}={value}, more pairs after commas", key, value, origin)
    elif table:
        rule = f"there is no table [{table}]"
        meant = closest(key, fields_by_key()) or _elsewhere(name)
        otherwise = f"the tables are {', '.join(tables())}"
    else:
        rule = f"every key belongs to a table, but {name!r} does not"
        meant = _elsewhere(name) or closest(key, fields_by_key())
        otherwise = "remove it; --help lists all keys"
    meant = RENAMED.get(key) or meant
    return Problem(rule, f"did you mean {meant}?" if meant else otherwise, key, value, origin)


def _elsewhere(name: str) -> str:
    """Return the keys of this name in any table, joined by "or"."""
    return " or ".join(key for key in fields_by_key() if key.rpartition(".")[2] == name)
