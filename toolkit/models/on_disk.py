"""The shape of a model that the files beside its weights tell. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import DataError, either, shown
from toolkit.io.json_fields import read_object
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.spec import CONFIG
from toolkit.models.registry import FAMILIES, spec

_MAX_CONFIG = 1_000_000  # bytes of a config.json, which has some thousand


def read_hf_config(folder: Path) -> ModelArgs:
    """Read the shape of the model whose config.json is in ``folder``.

    Raises:
        DataError: there is none, or it is of no model that is known; every field at fault is named.
    """
    path = folder / CONFIG
    values = read_object(path, at_most=_MAX_CONFIG)
    kind = values.get("model_type") or FAMILIES[0]
    forms = [spec(family).hf_config() for family in FAMILIES]
    for form in forms:
        if kind == form.model_type:
            return form.read(values, path)
    known = either(repr(form.model_type) for form in forms)
    raise DataError(
        f"{path} is of no model that can be read: model_type = {shown(kind)} (it must be {known})"
    )


def read_meta_params(folder: Path, *, vocab_size: int) -> ModelArgs:
    """Read the shape of the model whose params.json, which names no family, is in ``folder``.

    ``vocab_size`` is that of the embedding, for a file that leaves it to the tokenizer.

    Raises:
        DataError: there is none, or it is of another model; every field at fault is named.
    """
    [form] = [form for family in FAMILIES if (form := spec(family).meta_params()) is not None]
    return form.args_of(folder, vocab_size=vocab_size)
