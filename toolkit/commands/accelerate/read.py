"""Read accelerate's files and a Trainer's options as a list of keys, each with its line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.commands.accelerate.fsdp_keys import FSDP_KEYS
from toolkit.commands.accelerate.launch_keys import LAUNCH_KEYS
from toolkit.errors import ConfigError, Problem, did_you_mean
from toolkit.parallel.dims import STRATEGIES

TABLES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "parallelism_config": "parallelism_config_"}
"""Tables of the file, and what stands before the names of their keys."""

ALIASES = {
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "fsdp_cpu_offload": "fsdp_offload_params",
}
"""Names of other releases, and of a Trainer's fsdp_config."""

KEYS = FSDP_KEYS | LAUNCH_KEYS

_PLAIN = ("FULL_SHARD", "SHARD_GRAD_OP")
"""Strategies whose words only switch FSDP on where a file has ``reshard_after_forward``."""


@dataclass(frozen=True)
class Given:
    """A key as the user wrote it."""

    name: str
    value: Any
    origin: str


def read_file(path: Path) -> list[Given]:
    """Return every key of a YAML or JSON file, including those of inner tables, with its line.

    Raises:
        ConfigError: it cannot be read, or is not a table of keys.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(Problem(f"{path} cannot be read: {said}", "give the name of such a file")) from None
    read = _json_items if path.suffix == ".json" else _yaml_items
    given: list[Given] = []
    for name, value, origin in read(path, text):
        if prefix := TABLES.get(name):
            given += _inside(prefix, value, name, origin)
        else:
            given.append(Given(name, value, origin))
    return given


def _inside(prefix: str, value: Any, name: str, origin: str) -> Iterator[Given]:
    """Yield the keys of an inner table, by their names outside of it."""
    if not isinstance(value, dict | None):
        raise ConfigError(Problem("must be a table of keys", "give it keys of its own", name, value, origin))
    for key, (inner, where) in (value or {}).items():
        whole = str(key)
        yield Given(whole if whole.startswith((prefix, "xla")) else prefix + whole, inner, where)


def _json_items(path: Path, text: str) -> Iterator[tuple[str, Any, str]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        rule = f"{path}:{error.lineno}: not valid JSON: {error.msg}"
        raise ConfigError(Problem(rule, "correct it")) from None
    for key, value in _table(path, document).items():
        inner = isinstance(value, dict) and key in TABLES
        yield key, {name: (item, str(path)) for name, item in value.items()} if inner else value, str(path)


def _yaml_items(path: Path, text: str) -> Iterator[tuple[str, Any, str]]:
    try:
        import yaml
    except ImportError:
        fix = ".venv/bin/python -m pip install -c constraints.txt pyyaml, in the toolkit's folder"
        raise ConfigError(Problem("YAML needs PyYAML, which is not installed", fix)) from None

    def items(node: Any) -> Iterator[tuple[str, Any, str]]:
        loader.flatten_mapping(node)
        for key, value in node.value:
            name, where = str(loader.construct_object(key)), f"{path}:{key.start_mark.line + 1}"
            if name in TABLES and isinstance(value, yaml.MappingNode):
                yield name, {inner: (item, place) for inner, item, place in items(value)}, where
            else:
                yield name, loader.construct_object(value, deep=True), where

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        found = list(items(node)) if isinstance(node, yaml.MappingNode) else None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        said = getattr(error, "problem", None) or error
        raise ConfigError(Problem(f"{path}{line}: not valid YAML: {said}", "correct it")) from None
    if found is None:
        raise _no_table(path)
    yield from found


def _table(path: Path, document: Any) -> dict[str, Any]:
    if isinstance(document, dict):
        return document
    raise _no_table(path)


def _no_table(path: Path) -> ConfigError:
    return ConfigError(Problem(f"{path} has no keys", "name what `accelerate config` wrote"))


def read_trainer(options: argparse.Namespace) -> list[Given]:
    """Return the keys of a Trainer's --fsdp, --fsdp_config, --bf16 and --fp16; the file overrides --fsdp."""
    given = []
    if options.fsdp_config:
        for item in read_file(options.fsdp_config):
            plain = item.name in KEYS or item.name in ALIASES
            given.append(item if plain else Given(f"fsdp_{item.name}", item.value, item.origin))
    named = {ALIASES.get(item.name, item.name) for item in given}
    asked = [] if options.fsdp.lower() == "true" else options.fsdp.split()
    words = [Given(*_trainer_word(word), "--fsdp") for word in asked]
    if "fsdp_reshard_after_forward" in named:
        words = [word for word in words if word.value not in _PLAIN]
    given += [word for word in words if word.name not in named]
    precision = "bf16" if options.bf16 else "fp16" if options.fp16 else None
    return [*given, Given("mixed_precision", precision, f"--{precision}")] if precision else given


def _trainer_word(asked: str) -> tuple[str, Any]:
    words: dict[str, tuple[str, Any]] = {
        name.lower(): ("fsdp_sharding_strategy", name) for name in STRATEGIES
    }
    words["offload"] = ("fsdp_offload_params", True)
    words["auto_wrap"] = ("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    if asked.lower() not in words:
        fix = did_you_mean(asked, words, "write one of these")
        raise ConfigError(
            Problem(f"a Trainer's words are {', '.join(words)}", fix, "--fsdp", asked, "--fsdp")
        )
    return words[asked.lower()]
