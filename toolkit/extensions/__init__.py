"""Register custom models, optimizers, losses, schedules, datasets, converters and config tables.

The launcher and every rank import the module in ``job.custom_import`` before the configuration is checked; it
calls the functions here. Registered components are treated like built-in ones: their names are values of the
corresponding key in ``--help``, messages and checks. ``docs/extending.md`` shows examples.

    from toolkit.extensions import Table, register_optimizer

Import torch inside the registered functions, not in the module: the checks run without torch, whose import
would make them slow.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from importlib.util import find_spec
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError, create_model

from toolkit.config.schema import (
    NAME,
    Config,
    config_class,
    find_field,
    find_table,
    is_group,
    registry,
    set_config_class,
    table_of,
    tables,
)
from toolkit.config.types import OnlyWith, Table
from toolkit.data.sources import check_name
from toolkit.models.registry import ModelSpec, presets

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

_VALUE, _TABLE = re.compile(r"[\w.-]+"), re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def register_optimizer(
    name: str, build: Callable[[Any, Any], Any], options: type[Table] | None = None
) -> None:
    """Make ``name`` a value of optimizer.name.

    ``build(named_parameters, config)`` returns a torch.optim.Optimizer over the parameters that require
    gradients, which are DTensors. The optimizer's method ``fresh_state(parameter, group)`` returns the
    initial state tensors of a parameter by name. Checkpoints load into these tensors, and the optimizer
    must have no other state. ``options`` are the keys of the table [optimizer.NAME] (lower case); they are
    rejected with another optimizer.
    """
    _register("optimizer.name", name, build, options)


def register_loss(
    name: str, build: Callable[[Any], Callable[[Any, Any], Any]], options: type[Table] | None = None
) -> None:
    """Make ``name`` a value of loss.name.

    ``build(config)`` returns a function of logits (T, V) in the model's dtype and labels (T,) int64, −100 for
    ignored tokens. That function returns the loss of each token (T,), in at least fp32, 0 where the label is
    −100; the run's loss is the mean over tokens. The function is called with chunks of tokens, and with the
    full vocabulary even under tensor parallelism. ``options`` are the keys of [loss.NAME].
    """
    _register("loss.name", name, build, options)


def register_lr_schedule(name: str, factor: Callable[[int, int], float]) -> None:
    """Make ``name`` a value of lr_scheduler.decay_type.

    ``factor(step, total_steps)`` returns the learning rate as a fraction of optimizer.lr, before warmup;
    ``step`` is 1 for the first update.
    """
    _register("lr_scheduler.decay_type", name, factor)


def register_dataset(
    name: str, rows: Callable[[], Iterable[str | Mapping[str, Any]]], *, version: str
) -> None:
    """Make ``name`` a value of training.dataset, validation.dataset and the datasets of a mixture.

    ``rows()`` yields the documents in a fixed order: texts, or rows by column, which are read like rows of a
    file by data.format and data.text_column. The documents are tokenized once per ``version``, a string that
    must change whenever the documents change.
    """
    if name not in registry("training.dataset") and "/" not in name and check_name(name) is None:
        raise ValueError(f"the toolkit has a dataset {name}")
    _check_callable(rows)
    if not isinstance(version, str):
        raise ValueError(f'the version of {name} is a text, such as "1"')
    _store("training.dataset", name, (rows, version, sys._getframe(1).f_code.co_filename))


def register_model_converter(
    name: str, build: Callable[[Any], Any], options: type[Table] | None = None
) -> None:
    """Make ``name`` a value of model.converters.

    ``build(config)`` returns an object whose ``convert(model)`` changes a model in place, on the meta device,
    before it is sharded; this is called for each pipeline stage separately. An optional
    ``post_optimizer_hook(models)`` is called after each update. ``options`` are the keys of [model.NAME].
    """
    _register("model.converters", name, build, options)


def register_family(name: str, spec: ModelSpec) -> None:
    """Register the models of ``spec``, whose ModelArgs have the family ``name``.

    The models' names and flavors become values of model.name and model.flavor.
    """
    _check_name(name, _TABLE, "letters, digits and _")
    if find_spec(f"toolkit.models.{name}"):
        raise ValueError(f"the toolkit has a family {name}")
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"a family is a ModelSpec, not a {type(spec).__name__}")
    for model in sorted(spec.sizes.keys() & presets().keys()):
        raise ValueError(f"model.name has a value {model} already")
    for other in sorted({args.family for sizes in spec.sizes.values() for args in sizes.values()} - {name}):
        raise ValueError(f"ModelArgs of the family {name} have family = {other!r}")
    broken = [
        f"{model} {flavor}: MoEArgs.{field} = {getattr(args.moe, field)!r} {rule}"
        for model, sizes in spec.sizes.items()
        for flavor, args in sizes.items()
        if args.moe
        for field, rule in args.moe.broken_rules().items()
    ]
    if broken:
        raise ValueError("; ".join(broken))
    _store("model.name", name, spec)


def register_table(name: str, table: type[Table]) -> None:
    """Add the table [name] to the configuration; ``config.value(name)`` returns it.

    A dotted name is a nested table. Keys are fields with a default and a docstring, as in ``toolkit/config``.
    """
    _add_table(name, table)


def _register(key: str, name: str, build: Any, options: type[Table] | None = None) -> None:
    field = find_field(key)
    assert field is not None
    if name in _values(field.annotation):
        raise ValueError(f"{key} has a value {name} already")
    _check_callable(build)
    _store(key, name, build)
    _set_root(
        _replace_field(config_class(), key.split("."), lambda annotation: _with_value(annotation, name))
    )
    if options:
        mark = OnlyWith(key, (name,), rejected=True)
        _add_table(f"{key.partition('.')[0]}.{name.lower()}", options, mark)


def _check_callable(component: Any) -> None:
    if not callable(component):
        raise ValueError(f"register a function, not a {type(component).__name__}")


def _check_name(name: Any, allowed: re.Pattern[str], words: str) -> None:
    if not isinstance(name, str) or not allowed.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of {words}")


def _store(key: str, name: str, component: Any) -> None:
    _check_name(name, _VALUE, "letters, digits, _, - and .")
    if name in registry(key):
        raise ValueError(f"{name} is registered twice")
    registry(key)[name] = component


def _add_table(name: str, table: type[Table], *marks: OnlyWith) -> None:
    _check_table(table)
    if find_table(name) or find_field(name) or is_group(name):
        raise ValueError(f"the configuration has {name} already")
    *outer, last = name.split(".")
    parent = tables().get(".".join(outer)) if outer else config_class()
    if parent is None or NAME in outer:
        raise ValueError(f"there is no table {'.'.join(outer)} for {last}")
    _check_name(last, _TABLE, "letters, digits and _, as a table needs")
    if hasattr(parent, last):
        raise ValueError(f"{last} is a method of tables: choose another name")
    annotation: Any = Annotated.__class_getitem__((table, *marks)) if marks else table  # type: ignore[attr-defined]
    new = {last: (annotation, table())}
    if not outer:
        _set_root(_extend(config_class(), new))
        return
    _set_root(_replace_field(config_class(), outer, lambda parent: _extend(parent, new)))


def _check_table(table: Any) -> None:
    """Raise ValueError for keys or defaults that cannot be written in a TOML file."""
    if not (isinstance(table, type) and issubclass(table, Table)):
        raise ValueError(f"keys are a class of toolkit.extensions.Table, not {table!r}")
    for name, info in table.model_fields.items():
        if inner := table_of(info.annotation):
            _check_table(inner)
        elif not _is_supported(info.annotation):
            rule = "a key is a bool, int, float, str, Literal, a list of these, or one of them or None"
            raise ValueError(f"{table.__name__}.{name}: {rule}")
    try:
        table.model_validate(table().model_dump())
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (table.__name__, *first["loc"])))
        problem = "has no default" if first["type"] == "missing" else f"its default: {first['msg']}"
        raise ValueError(f"{key} {problem}") from None


def _is_supported(annotation: Any) -> bool:
    """Report whether messages and ``--help`` support the type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_supported(arguments[0])
    if origin in (Union, UnionType):
        return all(it is NoneType or _is_supported(it) for it in arguments)
    if origin is list:
        return arguments[0] is not bool and table_of(arguments[0]) is None and _is_supported(arguments[0])
    return origin is Literal or annotation in (bool, int, float, str, dict[str, str])


def _set_root(extended: type[Table]) -> None:
    assert issubclass(extended, Config)
    set_config_class(extended)


def _replace_field(table: type[Table], path: list[str], change: Callable[[Any], Any]) -> type[Table]:
    """Derive a class from ``table`` with another type for the field at ``path``."""
    name, *rest = path
    info = copy(table.model_fields[name])
    before: Any = info.annotation
    info.annotation = annotation = _replace_field(before, rest, change) if rest else change(before)
    if isinstance(before, type) and issubclass(before, Table):
        info.default = annotation()
    return _extend(table, {name: (annotation, info)})


def _extend(table: type[Table], fields: Mapping[str, Any]) -> type[Table]:
    return create_model(
        table.__name__, __base__=table, __module__=table.__module__, __doc__=table.__doc__, **fields
    )


def _values(annotation: Any) -> tuple[Any, ...]:
    return get_args(get_args(annotation)[0]) if get_origin(annotation) is list else get_args(annotation)


def _with_value(annotation: Any, name: str) -> Any:
    choice = Literal.__getitem__((*_values(annotation), name))
    return list[choice] if get_origin(annotation) is list else choice  # type: ignore[valid-type]
