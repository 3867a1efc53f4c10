"""Load a :class:`Config` from a command line: files that extend one another, overridden by flags.

The origin of every key is recorded. Errors are collected, so that all are reported at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from toolkit.config.cli import CONFIG_FILE, Arguments, read_arguments
from toolkit.config.local_paths import path_problem
from toolkit.config.schema import Config, clear_overridden, config_class, find_field
from toolkit.config.toml import EXTENDS, read_files
from toolkit.config.types import NONE, LocalPath
from toolkit.config.unsupported import UNSUPPORTED
from toolkit.config.values import Setting, format_toml
from toolkit.errors import ConfigError, Problem


class InvalidSettings(ConfigError):
    """Raised if some settings are invalid.

    ``rest`` is a config of the valid settings, in which reading an invalid one raises
    :class:`~toolkit.config.types.UnknownValue`; None if a file or flag could not be read.
    """

    def __init__(self, problems: Sequence[Problem], rest: Config | None):
        super().__init__(problems)
        self.rest = rest


def load_config(argv: Sequence[str]) -> Config:
    """Load the config for the arguments of ``python -m toolkit.train``.

    ``--help`` and ``--help TABLE`` print the keys and exit.

    Raises:
        InvalidSettings: Files or flags are invalid; contains every problem found.
        ConfigError: The module of job.custom_import cannot be imported.
    """
    arguments = _read(argv)
    if module := arguments.settings.get("job.custom_import"):
        from toolkit.config.custom_import import import_module

        if import_module(module):
            arguments = _read(argv)  # which may use registered tables and keys
    if arguments.help is not None:
        from toolkit.config.help import help_text

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for --help | head
        print(help_text(arguments.help))
        sys.exit(0)
    settings, problems = arguments.settings, arguments.problems
    problems += _unsupported({key: settings.pop(key) for key in settings.keys() & UNSUPPORTED.keys()})
    problems += _invalid_paths(settings)
    try:
        config = _build(settings)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise InvalidSettings(problems, _rest(settings, problems))
    return config


def _rest(settings: Mapping[str, Setting], problems: Sequence[Problem]) -> Config | None:
    """Return the config of the settings without problems; None if a file or argument could not be read."""
    from toolkit.config.did_you_mean import meant_keys

    keys = {problem.key for problem in problems}
    if not keys.isdisjoint(("", CONFIG_FILE, EXTENDS)):
        return None
    keys.update(key for problem in problems for key in meant_keys(problem.key, problem.value))
    prefixes = tuple(f"{key}." for key in keys)
    config = _build({key: it for key, it in settings.items() if not f"{key}.".startswith(prefixes)})
    for key in keys:
        config = config.without(key)
    return config


def asks_for_tracebacks(argv: Sequence[str]) -> bool:
    """Return whether a flag or file sets job.debug, even if other settings are invalid."""
    asked = _read(argv).settings.get("job.debug")
    return asked is not None and asked.value is True


def _read(argv: Sequence[str]) -> Arguments:
    """Parse the arguments and the files that they name."""
    arguments = read_arguments(argv)
    if CONFIG_FILE in arguments.settings:
        layer = read_files(str(arguments.settings[CONFIG_FILE].value))
        arguments.settings = layer.settings | arguments.settings
        arguments.problems += layer.problems
    return arguments


def _invalid_paths(settings: Mapping[str, Setting]) -> Iterator[Problem]:
    """Report values that cannot be paths; names of config files are reported when they are read."""
    for key, setting in settings.items():
        marks = field.marks if (field := find_field(key)) else ()
        for mark in (mark for mark in marks if isinstance(mark, LocalPath)):
            if found := path_problem(str(setting.value), storage=mark.storage):
                yield Problem(*found, key, setting.value, setting.origin)


def _unsupported(settings: Mapping[str, Setting]) -> Iterator[Problem]:
    """Report unsupported keys with other than their default values."""
    for key, setting in sorted(settings.items()):
        default, reason = UNSUPPORTED[key]
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
        config = config_class().model_validate(nested)
    except ValidationError as error:
        from toolkit.config.mistakes import wrong_value

        problems = [wrong_value(details["loc"], settings) for details in error.errors()]
        raise ConfigError(list({problem.key: problem for problem in problems}.values())) from None
    return clear_overridden(config.with_origins(settings))
