"""From a command line to a :class:`Config`: files that extend one another, then flags over them.

Every key that a file or flag sets is kept with its origin. Mistakes are collected, so that one run
reports them all.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from toolkit.config.cli import Arguments, read_arguments
from toolkit.config.local_paths import path_problem
from toolkit.config.refused import REFUSED
from toolkit.config.schema import Config, find_field, root, without_replaced
from toolkit.config.toml import read_files
from toolkit.config.types import NONE, LocalPath
from toolkit.config.values import Setting, format_toml
from toolkit.errors import ConfigError, Problem

_CONFIG_FILE = "job.config_file"


def load_config(argv: Sequence[str]) -> Config:
    """Read the config that the words after ``python -m toolkit.train`` ask for.

    ``--help`` and ``--help TABLE`` print the keys and exit.

    Raises:
        ConfigError: with every problem found in files and flags.
    """
    arguments = _read(argv)
    if module := arguments.settings.get("job.custom_import"):
        from toolkit.config.custom_import import import_module

        if import_module(module):
            arguments = _read(argv)  # which may use what it has registered
    if arguments.help is not None:
        from toolkit.config.help import help_text

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --help | head ends with its reader
        print(help_text(arguments.help))
        sys.exit(0)
    settings, problems = arguments.settings, arguments.problems
    problems += _refused({key: settings.pop(key) for key in settings.keys() & REFUSED.keys()})
    problems += _no_paths(settings)
    try:
        config = _build(settings)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def asks_for_tracebacks(argv: Sequence[str]) -> bool:
    """Say if a flag or a file sets job.debug, whatever else may be wrong with them."""
    asked = _read(argv).settings.get("job.debug")
    return asked is not None and asked.value is True


def _read(argv: Sequence[str]) -> Arguments:
    """The arguments, with settings and problems of the files that they name."""
    arguments = read_arguments(argv)
    if _CONFIG_FILE in arguments.settings:
        layer = read_files(str(arguments.settings[_CONFIG_FILE].value))
        arguments.settings = layer.settings | arguments.settings
        arguments.problems += layer.problems
    return arguments


def _no_paths(settings: Mapping[str, Setting]) -> Iterator[Problem]:
    """Report values that can be no path where one is meant; of names of config files, reading them tells."""
    for key, setting in settings.items():
        marks = field.marks if (field := find_field(key)) else ()
        for mark in (mark for mark in marks if isinstance(mark, LocalPath)):
            if found := path_problem(str(setting.value), storage=mark.storage):
                yield Problem(*found, key, setting.value, setting.origin)


def _refused(settings: Mapping[str, Setting]) -> Iterator[Problem]:
    """Report keys that do not act, at other than their defaults."""
    for key, setting in sorted(settings.items()):
        default, reason = REFUSED[key]
        if setting.value not in (default, NONE if default is None else default):
            fix = f"remove it, or set {key.rpartition('.')[2]} = {format_toml(default)}, the default"
            yield Problem(reason, fix, key, setting.value, setting.origin)


def _build(settings: Mapping[str, Setting]) -> Config:
    nested: dict[str, Any] = {}
    for key, setting in settings.items():
        *path, name = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[name] = setting.value
    try:
        config = root().model_validate(nested)
    except ValidationError as error:
        from toolkit.config.mistakes import wrong_value

        problems = [wrong_value(details["loc"], settings) for details in error.errors()]
        raise ConfigError(list({problem.key: problem for problem in problems}.values())) from None
    return without_replaced(config.with_origins(settings))
