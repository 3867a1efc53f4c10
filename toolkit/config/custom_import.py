"""Import of the module in ``job.custom_import``, with errors that point to the user's code.

The launcher and every rank import it before the configuration is validated. The module calls the functions of
``toolkit/extensions``.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from toolkit.config.schema import Config
from toolkit.config.values import Setting
from toolkit.errors import ConfigError, Problem

KEY = "job.custom_import"
_TOOLKIT = os.path.join(Path(__file__).parents[1], "")


def import_module(setting: Setting) -> bool:
    """Import the module that ``setting`` names; returns False if it is already imported.

    Raises:
        ConfigError: There is no such module, or it raises an error, which is reported with file and line.
    """
    name = setting.value
    if not isinstance(name, str) or not name:
        return False
    if invalid := _invalid_name(name):
        raise ConfigError(Problem(*invalid, KEY, name, setting.origin))
    if name in sys.modules:
        return False
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any error of a user's module, including sys.exit()
        raise ConfigError(Problem(*_describe(error, name), KEY, name, setting.origin)) from error
    if module.__file__ is None:
        rule = f"{list(module.__path__)[0]} has no __init__.py, so nothing in it is imported"
        fix = "add one that imports the files which register components, or set one of the files"
        raise ConfigError(Problem(rule, fix, KEY, name, setting.origin))
    return True


def component_error(config: Config, key: str, name: str, made: Any, rule: str) -> ConfigError:
    """Return the error for a registered object ``made``, selected by ``key = name``, that breaks a
    ``rule``."""
    code = getattr(made, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
    return ConfigError(Problem(f"{where}{rule}", "correct the module", key, name, config.origin(key)))


def user_location(error: BaseException) -> str:
    """Return "file:line: " of the user's code that raised an error, or "" if none was reached.

    If toolkit code raised the error, this is the location of the user's call.
    """
    location = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(_TOOLKIT):
            if location:
                break
        elif "importlib" not in frame.filename:
            location = f"{frame.filename}:{frame.lineno}: "
    return location


def _invalid_name(name: str) -> tuple[str, str] | None:
    """Return rule and fix for a name that cannot be a user's module."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        fix = "write one module name as in an import, such as my_package or my_package.file"
        return "is not a module name", fix
    if name.partition(".")[0] in sys.stdlib_module_names:
        return "is a module of Python's standard library", "rename your module"
    return None


def _describe(error: BaseException, name: str) -> tuple[str, str]:
    """Return rule and fix for an error during import."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        rule = f"there is no module {error.name}"
        return rule, "add the folder that contains it to PYTHONPATH, or correct the name"
    where = user_location(error)
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}: "
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{where}{type(error).__name__}: {message}", "correct the module"
