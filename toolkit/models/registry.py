"""Families of models, and their sizes by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import registry
from toolkit.errors import ConfigError, Problem, did_you_mean
from toolkit.models.common.args import ModelArgs, changed, takes_vocabulary
from toolkit.models.common.attention_choice import flavor_attention
from toolkit.models.common.spec import ModelSpec

if TYPE_CHECKING:
    from toolkit.models.common.chat_format import ChatFormat
    from toolkit.models.common.tiktoken_form import TiktokenForm

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Folders beside this file; a config.json that does not say what it is is of the first."""


def families() -> tuple[str, ...]:
    """The families by name, those that job.custom_import has registered last."""
    return (*FAMILIES, *registry("model.name"))


def spec(family: str) -> ModelSpec:
    """The family called so in :class:`~toolkit.models.common.args.ModelArgs`. Raises KeyError for none."""
    if family in (registered := registry("model.name")):
        return registered[family]
    if family not in FAMILIES:
        raise KeyError(f"there is no family of models {family}")
    return import_module(f"toolkit.models.{family}").SPEC


def presets() -> dict[str, Mapping[str, ModelArgs]]:
    """Shapes by ``model.name`` and ``model.flavor``."""
    return {name: sizes for family in families() for name, sizes in spec(family).sizes.items()}


def tiktoken_forms() -> Iterator[TiktokenForm]:
    """The forms of tiktoken files of all families, which are loaded one by one."""
    for family in families():
        yield from spec(family).tiktoken_forms()


def chat_formats() -> dict[str, type[ChatFormat]]:
    """The formats of prompts of all families, by name."""
    return {name: form for family in families() for name, form in spec(family).chat_formats().items()}


def resolve(name: str, flavor: str, *, tokenizer_vocab: int | None = None, **overrides: Any) -> ModelArgs:
    """The shape of ``name``/``flavor`` with fields replaced as by :func:`changed`.

    ``ffn_dim`` follows ``dim`` by the preset's own rule. A debugmodel without ``vocab_size`` has
    ``tokenizer_vocab`` entries.

    Raises:
        ConfigError: no such name or flavor, or values that do not fit together; all of them at once.
    """
    preset = _find(name, flavor)
    if takes_vocabulary(flavor) and tokenizer_vocab is not None and overrides.get("vocab_size") is None:
        overrides["vocab_size"] = tokenizer_vocab
    return changed(preset, ffn_rule=spec(preset.family).ffn_rule(name, flavor), **overrides)


def _find(name: str, flavor: str) -> ModelArgs:
    for family in families():
        flavors = spec(family).sizes.get(name, {})
        if flavor in flavors:
            return flavors[flavor]
    raise ConfigError(_unknown(name, flavor))


def _unknown(name: str, flavor: str) -> Problem:
    """Tell which preset a name or flavor that does not exist may mean."""
    sizes = presets()
    if name not in sizes:
        fix = did_you_mean(name, sizes, "set model.name to one of them")
        return Problem(f"the models are {', '.join(sizes)}", fix, "model.name", name)
    elsewhere = [other for other, flavors in sizes.items() if flavor in flavors]
    fix = did_you_mean(flavor, sizes[name], "set model.flavor to one of them")
    size, named = flavor.partition("_")[0], flavor_attention(flavor)
    if named and size in sizes[name]:
        fix = f'set model.flavor = "{size}" and model.attention = "{named}"'
    if elsewhere:
        fix = f"{flavor} is a flavor of {', '.join(elsewhere)}: set model.name to one of them, or {fix}"
    return Problem(f"the flavors of {name} are {', '.join(sizes[name])}", fix, "model.flavor", flavor)
