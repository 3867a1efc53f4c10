"""Importing the module that ``job.custom_import`` names, and telling where its code fails.

It is imported before the configuration is checked, by the launcher and by every rank, and calls the functions
of ``toolkit/extensions``.
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
    """Import the module that ``setting`` names; False where it is imported already.

    Raises:
        ConfigError: there is no such module, or it raises an error: with its file and line.
    """
    name = setting.value
    if not isinstance(name, str) or not name:
        return False
    if misnamed := _misnamed(name):
        raise ConfigError(Problem(*misnamed, KEY, name, setting.origin))
    if name in sys.modules:
        return False
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a user's module does wrong, sys.exit() too
        raise ConfigError(Problem(*_described(error, name), KEY, name, setting.origin)) from error
    if module.__file__ is None:
        rule = f"{list(module.__path__)[0]} has no __init__.py, so that nothing of it is imported"
        fix = "import there the files that register something, or name one of them"
        raise ConfigError(Problem(rule, fix, KEY, name, setting.origin))
    return True


def misused(config: Config, key: str, name: str, made: Any, rule: str) -> ConfigError:
    """The error of ``made``, which ``name`` of ``key`` stands for and which breaks a ``rule`` of its kind."""
    code = getattr(made, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}: " if code else ""
    return ConfigError(Problem(f"{where}{rule}", "correct the module", key, name, config.origin(key)))


def place_of(error: BaseException) -> str:
    """The file and line where a user's code has raised an error, empty where no such code was reached.

    It is the call where the toolkit refuses one.
    """
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(_TOOLKIT):
            if place:
                break
        elif "importlib" not in frame.filename:
            place = f"{frame.filename}:{frame.lineno}: "
    return place


def _misnamed(name: str) -> tuple[str, str] | None:
    """The rule and the fix of a name that no module of a user's can have."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        fix = "name one module as import does, such as my_package or my_package.file"
        return "is no name of a module", fix
    if name.partition(".")[0] in sys.stdlib_module_names:
        return "is a module of Python itself", "give yours another name"
    return None


def _described(error: BaseException, name: str) -> tuple[str, str]:
    """The rule and the fix of an error at import."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        rule = f"there is no module {error.name} to import"
        return rule, "put the folder that holds it into PYTHONPATH, or correct the name"
    where = place_of(error)
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}: "
    said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{where}{type(error).__name__}: {said}", "correct the module"
