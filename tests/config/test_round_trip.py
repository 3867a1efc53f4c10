"""A config written as TOML, or as flags, loads to an equal config."""

from __future__ import annotations

import string
import typing
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Interval, Lt
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.config import Config, load_config
from toolkit.config.local_paths import path_problem
from toolkit.config.schema import NAME, Field, fields_by_key, find_field
from toolkit.config.types import LocalPath
from toolkit.config.values import format_toml

TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text != "None")


def values(annotation: Any, marks: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return values(arguments[0], arguments[1:])
    if origin in (typing.Union, UnionType):
        # "a" as a flag of list[str] | str is a list of one; both mean the same to whoever reads the key.
        kinds = [kind for kind in arguments if not (kind is str and list[str] in arguments)]
        return st.one_of(*(values(kind, marks) for kind in kinds))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(TEXT, values(arguments[1]), max_size=3)
    bounds = {
        name: value
        for mark in marks
        if isinstance(mark, Ge | Gt | Interval | Lt)
        for name in ("ge", "gt", "le", "lt")
        if (value := getattr(mark, name, None)) is not None
    }
    if annotation is int:
        return st.integers(bounds.get("ge", -(2**63)), bounds.get("le", 2**63 - 1))
    if annotation is float:
        return st.floats(
            bounds.get("ge", bounds.get("gt", -1e300)),
            bounds.get("le", bounds.get("lt", 1e300)),
            exclude_min="gt" in bounds,
            exclude_max="lt" in bounds,
        )
    return {bool: st.booleans(), str: TEXT, NoneType: st.none()}[annotation]


# A file and a module, which have to be there.
KEYS = sorted(fields_by_key().keys() - {"job.config_file", "job.custom_import"})
OF_MIXTURES = [key for key in KEYS if NAME in key]  # there are few: draw them more often
NAMES = st.text(string.ascii_letters + string.digits + "-_", min_size=1, max_size=3)
GIVEN = st.tuples(st.sampled_from(KEYS) | st.sampled_from(OF_MIXTURES), NAMES).map(
    lambda key_and_name: key_and_name[0].replace(NAME, key_and_name[1])
)
SETTINGS = st.lists(GIVEN, unique=True, max_size=8).flatmap(
    lambda keys: st.fixed_dictionaries({key: value_of(find_field(key)) for key in keys})
)


def value_of(field: Field | None) -> st.SearchStrategy[Any]:
    assert field is not None
    found = values(field.annotation, field.marks)
    is_path = any(isinstance(mark, LocalPath) for mark in field.marks)
    return found.filter(lambda value: not path_problem(str(value))) if is_path else found


def config_of(chosen: dict[str, Any]) -> Config:
    nested: dict[str, Any] = {}
    for key, value in chosen.items():
        *path, name = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return Config.model_validate(nested)


@settings(max_examples=60, deadline=None)
@given(chosen=SETTINGS)
def test_toml_round_trip(chosen: dict[str, Any], tmp_path_factory: Any) -> None:
    config = config_of(chosen)
    path: Path = tmp_path_factory.getbasetemp() / "resolved.toml"
    for origins in (True, False):
        path.write_text(config.to_toml(origins), encoding="utf-8")
        loaded = load_config(["--job.config_file", str(path)])
        assert loaded.job.config_file == str(path)
        assert loaded.model_dump(exclude={"job": {"config_file"}}) == config.model_dump(
            exclude={"job": {"config_file"}}
        )


def as_flag(value: Any) -> str:
    if value is None or isinstance(value, str):
        return "None" if value is None else value
    return format_toml(value)


@settings(max_examples=60, deadline=None)
@given(chosen=SETTINGS)
def test_flag_round_trip(chosen: dict[str, Any]) -> None:
    assert load_config([f"--{key}={as_flag(value)}" for key, value in chosen.items()]) == config_of(chosen)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT.filter(lambda t: t == t.strip() and "," not in t and t[:1] != "["), min_size=1))
def test_lists_with_commas(items: list[str]) -> None:
    if items == [""]:
        return
    config = load_config([f"--optimizer.no_decay={','.join(items)}"])
    assert config.optimizer.no_decay == items
