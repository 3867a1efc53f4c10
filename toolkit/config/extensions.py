"""Names that a user's module adds: models, optimizers, losses, schedules, data, converters, tables of keys.

A module that ``job.custom_import`` names is imported before the configuration is checked, by the launcher and
by every rank, and calls the functions here. What it registers under a name is then a value of the key that
chooses it, with the toolkit's own: in ``--help``, in messages, in checks. ``docs/extending.md`` shows each.

    from toolkit.config.extensions import Table, register_optimizer

The module is imported where torch may not be needed: what needs torch imports it in the function that is
registered, or checks take as long as torch's import.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from importlib.util import find_spec
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import create_model

from toolkit.config.schema import Config, added, find_field, root, set_root, tables
from toolkit.config.toml import Setting
from toolkit.config.types import ActsWith, Table
from toolkit.errors import ConfigError, Problem

__all__ = [
    "Table",
    "register_dataset",
    "register_family",
    "register_loss",
    "register_lr_schedule",
    "register_model_converter",
    "register_optimizer",
    "register_table",
]

KEY = "job.custom_import"


def register_optimizer(
    name: str,
    build: Callable[[Any, Any], Any],
    options: type[Table] | None = None,
) -> None:
    """Make ``name`` a value of optimizer.name.

    ``build(named_parameters, config)`` returns a torch.optim.Optimizer over those that require gradients;
    they are DTensors. The optimizer has a method ``fresh_state(parameter, group)``: the tensors, by name,
    that it keeps of a parameter before its first step, so that checkpoints are loaded into them. ``options``
    are keys of the table [optimizer.NAME], name in lower case, refused with another optimizer.
    """
    _register("optimizer.name", name, build, options)


def register_loss(
    name: str,
    build: Callable[[Any], Callable[[Any, Any], Any]],
    options: type[Table] | None = None,
) -> None:
    """Make ``name`` a value of loss.name.

    ``build(config)`` returns a function of logits (T, V), in the model's precision, and labels (T,) int64,
    −100 for a token that does not count. It returns the loss of each token (T,), of at least fp32 and 0 where
    the label is −100; the run's loss is their mean. It sees a chunk of the tokens at a time, and the whole
    vocabulary under tensor parallelism too. ``options`` are keys of [loss.NAME].
    """
    _register("loss.name", name, build, options)


def register_lr_schedule(name: str, factor: Callable[[int, int], float]) -> None:
    """Make ``name`` a value of lr_scheduler.decay_type.

    ``factor(step, total_steps)`` is the learning rate as a part of optimizer.lr, which the warm-up
    multiplies; ``step`` is 1 for the first update.
    """
    _register("lr_scheduler.decay_type", name, factor)


def register_dataset(
    name: str, rows: Callable[[], Iterable[str | Mapping[str, Any]]], *, version: str
) -> None:
    """Make ``name`` a value of training.dataset, validation.dataset and the datasets of a mixture.

    ``rows()`` gives each document in order, always the same: a text, or a row by columns, as data.format and
    data.text_column read one of a file. They are tokenised once for each ``version``, any text, which changes
    with them.
    """
    if "/" in name or not name:
        raise ValueError(f"a dataset's name has no slash: {name!r}")
    _store("training.dataset", name, (rows, version, sys._getframe(1).f_code.co_filename))


def register_model_converter(
    name: str, build: Callable[[Any], Any], options: type[Table] | None = None
) -> None:
    """Make ``name`` a value of model.converters.

    ``build(config)`` returns an object whose ``convert(model)`` changes a model in place, on the meta device
    and before it is sharded: each stage of a pipeline by itself. Where it has ``post_optimizer_hook(models)``
    that is called after each update. ``options`` are keys of [model.NAME].
    """
    _register("model.converters", name, build, options)


def register_family(name: str, spec: Any) -> None:
    """Add the models of a :class:`toolkit.models.common.spec.ModelSpec`, whose args have the family ``name``.

    Their names and flavors are values of model.name and model.flavor.
    """
    if find_spec(f"toolkit.models.{name}"):
        raise ValueError(f"the toolkit has a family {name}")
    _store("model.name", name, spec)


def register_table(name: str, table: type[Table]) -> None:
    """Add the table [name] of keys to the configuration; ``config.value(name)`` returns it.

    A dotted name is a table inside another. A key is a field with a default and a docstring, as in
    ``toolkit/config``.
    """
    _add_table(name, table)


def import_module(setting: Setting) -> bool:
    """Import the module that ``setting`` names; False where it is imported already.

    Raises:
        ConfigError: there is no such module, or it raises an error: with its file and line.
    """
    name = setting.value
    if not isinstance(name, str) or not name or name in sys.modules:
        return False
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever a user's module does wrong
        raise ConfigError(Problem(*_described(error, name), KEY, name, setting.origin)) from error
    return True


def _register(key: str, name: str, build: Any, options: type[Table] | None = None) -> None:
    field = find_field(key)
    assert field is not None
    if name in _values(field.annotation):
        raise ValueError(f"{key} has a value {name} already")
    _store(key, name, build)
    _set_root(_changed(root(), key.split("."), lambda annotation: _with_value(annotation, name)))
    if options:
        mark = ActsWith(key, (name,), refused=True)
        _add_table(f"{key.partition('.')[0]}.{name.lower()}", options, mark)


def _store(key: str, name: str, what: Any) -> None:
    if name in added(key):
        raise ValueError(f"{name} is registered twice")
    added(key)[name] = what


def _add_table(name: str, table: type[Table], *marks: ActsWith) -> None:
    if name in tables() or find_field(name):
        raise ValueError(f"the configuration has {name} already")
    *outer, last = name.split(".")
    annotation: Any = Annotated.__class_getitem__((table, *marks)) if marks else table  # type: ignore[attr-defined]
    new = {last: (annotation, table())}
    if not outer:
        _set_root(_extended(root(), new))
        return
    _set_root(_changed(root(), outer, lambda holder: _extended(holder, new)))


def _set_root(extended: type[Table]) -> None:
    assert issubclass(extended, Config)
    set_root(extended)


def _changed(table: type[Table], path: list[str], change: Callable[[Any], Any]) -> type[Table]:
    """``table`` with another type of the field at ``path``."""
    name, *rest = path
    info = copy(table.model_fields[name])
    found: Any = info.annotation
    info.annotation = annotation = _changed(found, rest, change) if rest else change(found)
    if isinstance(found, type) and issubclass(found, Table):
        info.default = annotation()
    return _extended(table, {name: (annotation, info)})


def _extended(table: type[Table], fields: Mapping[str, Any]) -> type[Table]:
    return create_model(
        table.__name__, __base__=table, __module__=table.__module__, __doc__=table.__doc__, **fields
    )


def _values(annotation: Any) -> tuple[Any, ...]:
    return get_args(get_args(annotation)[0]) if get_origin(annotation) is list else get_args(annotation)


def _with_value(annotation: Any, name: str) -> Any:
    choice = Literal.__getitem__((*_values(annotation), name))
    return list[choice] if get_origin(annotation) is list else choice  # type: ignore[valid-type]


def _described(error: Exception, name: str) -> tuple[str, str]:
    """The rule and the fix of an error at import."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
        rule = f"there is no module {error.name} to import"
        return rule, "put the folder that holds it into PYTHONPATH, or correct the name"
    where = ""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}: "
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [it for it in frames if "importlib" not in it.filename and it.filename != __file__]
        where = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
    said = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{where}{type(error).__name__}: {said}", "correct the module"
