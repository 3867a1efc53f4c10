"""Registry of model families and presets. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import registry
from toolkit.errors import ConfigError, Problem, did_you_mean
from toolkit.models.common.args import ModelArgs, override_args, vocab_from_tokenizer
from toolkit.models.common.attention_choice import flavor_attention
from toolkit.models.common.spec import ModelSpec

if TYPE_CHECKING:
    from toolkit.models.common.chat_format import ChatFormat
    from toolkit.models.common.tiktoken_form import TiktokenForm

FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss",
    "llama4",
)  # fmt: skip
"""Folders next to this file. A config.json without model_type belongs to the first family."""


def families() -> tuple[str, ...]:
    """Return the names of the families; families registered by job.custom_import come last."""
    return (*FAMILIES, *registry("model.name"))


def spec(family: str) -> ModelSpec:
    """Return the :class:`ModelSpec` of ``family``.

    Raises:
        KeyError: there is no such family.
    """
    if family in (registered := registry("model.name")):
        return registered[family]
    if family not in FAMILIES:
        raise KeyError(f"there is no model family {family}")
    return import_module(f"toolkit.models.{family}").SPEC


def presets() -> dict[str, Mapping[str, ModelArgs]]:
    """Return model args by ``model.name`` and ``model.flavor``."""
    return {name: sizes for family in families() for name, sizes in spec(family).sizes.items()}


def tiktoken_forms() -> Iterator[TiktokenForm]:
    """Yield the formats of tiktoken files of all families, importing one family at a time."""
    for family in families():
        yield from spec(family).tiktoken_forms()


def chat_formats() -> dict[str, type[ChatFormat]]:
    """Return the chat formats of all families, by name."""
    return {name: kind for family in families() for name, kind in spec(family).chat_formats().items()}


def resolve(name: str, flavor: str, *, tokenizer_vocab: int | None = None, **overrides: Any) -> ModelArgs:
    """Return the preset ``name``/``flavor`` with fields replaced as in :func:`override_args`.

    ``ffn_dim`` follows ``dim`` by the preset's rule. A debug model without ``vocab_size`` has a vocabulary of
    ``tokenizer_vocab`` entries.

    Raises:
        ConfigError: the name or flavor is unknown, or values are inconsistent; all problems are reported.
    """
    named = (spec(family).sizes.get(name, {}) for family in families())
    preset = next((sizes[flavor] for sizes in named if flavor in sizes), None)
    if preset is None:
        raise ConfigError(_unknown_preset(name, flavor))
    if vocab_from_tokenizer(flavor) and tokenizer_vocab is not None and overrides.get("vocab_size") is None:
        overrides["vocab_size"] = tokenizer_vocab
    return override_args(preset, ffn_rule=spec(preset.family).ffn_rule(name, flavor), **overrides)


def _unknown_preset(name: str, flavor: str) -> Problem:
    """Describe an unknown name or flavor, and suggest presets."""
    sizes = presets()
    if name not in sizes:
        fix = did_you_mean(name, sizes, "set model.name to one of them")
        return Problem(f"the models are {', '.join(sizes)}", fix, "model.name", name)
    elsewhere = [other for other, flavors in sizes.items() if flavor in flavors]
    fix = did_you_mean(flavor, sizes[name], "set model.flavor to one of them")
    size, attention = flavor.partition("_")[0], flavor_attention(flavor)
    if attention and size in sizes[name]:
        fix = f'set model.flavor = "{size}" and model.attention = "{attention}"'
    if elsewhere:
        fix = f"{flavor} is a flavor of {', '.join(elsewhere)}: set model.name to one of them, or {fix}"
    return Problem(f"the flavors of {name} are {', '.join(sizes[name])}", fix, "model.flavor", flavor)
