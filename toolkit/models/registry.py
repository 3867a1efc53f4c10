"""The families, and which model a configuration means: a preset by name, or what a config.json says.

Imports no torch.

``model.name`` and ``model.flavor`` name a preset. Where neither is set, the architecture is that of the
Hugging Face folder that the run starts from (``checkpoint.initial_load_in_hf``), else of the config.json in
``model.hf_assets_path`` if there is one, else llama3 debugmodel. The keys ``model.*`` change either.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import read_manifest
from toolkit.config import Config
from toolkit.config.values import dotted
from toolkit.errors import CheckpointError, ConfigError, DataError, Problem, did_you_mean
from toolkit.io.json_fields import read_object
from toolkit.models.common.args import ModelArgs, changed, takes_vocabulary
from toolkit.models.common.attention_choice import flavor_attention
from toolkit.models.common.hf_config import CONFIG
from toolkit.models.common.spec import ModelSpec

EXPORTS = "hf"
"""Folder, inside that of a run, of the Hugging Face folders that it writes, one a step."""
FAMILIES = ("llama", "qwen3")
"""Folders beside this file; a config.json that does not say what it is is of the first."""
_NAME, _FLAVOR = "llama3", "debugmodel"


def spec(family: str) -> ModelSpec:
    """The family called so in :class:`~toolkit.models.common.args.ModelArgs`. Raises KeyError for none."""
    if family not in FAMILIES:
        raise KeyError(f"there is no family of models {family}")
    return import_module(f"toolkit.models.{family}").SPEC


def presets() -> dict[str, Mapping[str, ModelArgs]]:
    """Shapes by ``model.name`` and ``model.flavor``."""
    return {name: sizes for family in FAMILIES for name, sizes in spec(family).sizes.items()}


def read_hf_config(folder: Path) -> ModelArgs:
    """Read the shape of the model whose config.json is in ``folder``.

    Raises:
        DataError: there is none, or it is of no model that is known; every field at fault is named.
    """
    path = folder / CONFIG
    kind = read_object(path).get("model_type") or FAMILIES[0]
    for family in FAMILIES:
        if spec(family).hf_config.model_type == kind:
            return spec(family).hf_config.read(path)
    known = " or ".join(repr(spec(family).hf_config.model_type) for family in FAMILIES)
    raise DataError(f"{path} is of no model that can be read: model_type = {kind!r} (it must be {known})")


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
    sizes = presets()
    if name not in sizes:
        fix = did_you_mean(name, sizes, "set model.name to one of them")
        raise ConfigError(Problem(f"the models are {', '.join(sizes)}", fix, "model.name", name))
    if flavor not in sizes[name]:
        elsewhere = [other for other, flavors in sizes.items() if flavor in flavors]
        fix = did_you_mean(flavor, sizes[name], "set model.flavor to one of them")
        size, named = flavor.partition("_")[0], flavor_attention(flavor)
        if named and size in sizes[name]:
            fix = f'set model.flavor = "{size}" and model.attention = "{named}"'
        if elsewhere:
            fix = f"{flavor} is a flavor of {', '.join(elsewhere)}: set model.name to one of them, or {fix}"
        rule = f"the flavors of {name} are {', '.join(sizes[name])}"
        raise ConfigError(Problem(rule, fix, "model.flavor", flavor))
    return sizes[name][flavor]


def model_args(config: Config, *, tokenizer_vocab: int | None) -> ModelArgs:
    """The shape of the model; a debugmodel has the vocabulary ``tokenizer_vocab``.

    Raises:
        ConfigError: the preset does not exist, or values of ``model.*`` contradict one another.
        DataError: the config.json is of no model that is known.
    """
    model = config.model
    folder = config_folder(config)
    if folder is not None:
        return changed(read_hf_config(folder), **model.overrides())
    name, flavor = model.name or _NAME, model.flavor or _FLAVOR
    return resolve(name, flavor, tokenizer_vocab=tokenizer_vocab, **model.overrides())


def needs_tokenizer(config: Config) -> bool:
    """Say if the shape of the model is known only with its tokenizer."""
    named = config_folder(config) is None and takes_vocabulary(config.model.flavor or _FLAVOR)
    return named and config.model.vocab_size is None


def model_named(config: Config) -> str:
    """What to call the model: "llama3.1 8B", or the config.json that describes it."""
    folder = config_folder(config)
    if folder is not None:
        return str(folder / CONFIG)
    return f"{config.model.name or _NAME} {config.model.flavor or _FLAVOR}"


def architecture_key(config: Config) -> str:
    """The key that says what the model is: that of a folder with a config.json, or model.flavor."""
    model, options = config.model, config.checkpoint
    if model.name is not None or model.flavor is not None:
        return "model.flavor"
    # What rank 0 alone sees cannot tell the other nodes their model.
    if options.initial_load_in_hf and options.initial_load_path and not options.initial_load_broadcast:
        return "checkpoint.initial_load_path"
    wanted = options.initial_load_in_hf and not options.initial_load_path
    has_config = (_local(model.hf_assets_path) / CONFIG).is_file()
    return "model.hf_assets_path" if wanted or has_config else "model.flavor"


def config_folder(config: Config) -> Path | None:
    """The folder whose config.json is the architecture; None where a preset is."""
    key = architecture_key(config)
    return None if key == "model.flavor" else hugging_face_folder(config.value(key))


def weights_folder(config: Config) -> Path | None:
    """The Hugging Face folder whose weights a new run takes; None where it takes none."""
    options = config.checkpoint
    if not options.enable or not options.initial_load_in_hf:
        return None
    return hugging_face_folder(options.initial_load_path or config.model.hf_assets_path)


def hugging_face_folder(path: str) -> Path:
    """The folder that a user means by ``path``: that, or of a checkpoint the folder that its run has written
    beside it at the same step. torchtitan's ``last_save_in_hf`` writes it in the checkpoint's place."""
    folder = _local(path)
    try:
        saved = dotted(read_manifest(folder)["run"].get("config", ""))
    except CheckpointError:
        return folder  # no checkpoint, or one of which another check tells what is wrong
    exported = _run_folder(folder, saved) / EXPORTS / folder.name
    return exported if exported.is_dir() else folder


def _run_folder(step: Path, saved: Mapping[str, Any]) -> Path:
    """The folder of the run with the config ``saved``: as many levels above its checkpoint as that says,
    wherever the folder was moved since."""
    inside = Path(saved.get("checkpoint.folder", "checkpoint"))
    if inside.is_absolute():
        return _local(saved["job.dump_folder"])
    return Path(os.path.normpath(step.joinpath("..", *[".."] * len(inside.parts))))


def _local(path: str) -> Path:
    return Path(os.path.expanduser(path))
