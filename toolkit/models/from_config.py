"""Resolve a configuration to model args, from a preset or a config.json. Imports no torch.

``model.name`` and ``model.flavor`` select a preset. If neither is set, the architecture comes from the
Hugging Face folder that the run starts from (``checkpoint.initial_load_in_hf``), else from the config.json in
``model.hf_assets_path`` if there is one, else from the preset llama3 debugmodel. ``model.*`` keys override
single hyperparameters in all three cases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from toolkit.config import Config
from toolkit.config.local_paths import assets_folder
from toolkit.models.common.args import Classifier, ModelArgs, override_args, vocab_from_tokenizer
from toolkit.models.common.attention_choice import choose_attention
from toolkit.models.common.spec import CONFIG
from toolkit.models.registry import resolve

_NAME, _FLAVOR = "llama3", "debugmodel"


def model_args(config: Config, *, tokenizer_vocab: int | None) -> ModelArgs:
    """Return the model args; a debug model gets the vocabulary size ``tokenizer_vocab``.

    Raises:
        ConfigError: the preset does not exist, or values of ``model.*`` are inconsistent.
        DataError: the config.json describes an unknown model.
    """
    model = config.model
    asked = model.overrides()
    # Among inconsistent sizes, blame the one that the user set most directly.
    closest = sorted(reversed(asked), key=lambda name: config.depth(f"model.{name}"))
    overrides = {name: asked[name] for name in closest}
    folder = config_folder(config)
    if folder is not None:
        from toolkit.models.on_disk import read_hf_config

        args = override_args(read_hf_config(folder), **overrides)
    else:
        name, flavor = model.name or _NAME, model.flavor or _FLAVOR
        args = resolve(name, flavor, tokenizer_vocab=tokenizer_vocab, **overrides)
    options = config.finetune
    if not options.classes:
        return args
    classifier = Classifier(options.classes, tuple(options.classification.hidden_sizes))
    return replace(args, classifier=classifier, tie_embeddings=False)


def needs_tokenizer(config: Config) -> bool:
    """Return whether the model args depend on the tokenizer."""
    preset = config_folder(config) is None
    return preset and config.model.vocab_size is None and vocab_from_tokenizer(config.model.flavor or _FLAVOR)


def model_label(config: Config) -> str:
    """Return the model's name for messages: "llama3.1 8B", or the path of its config.json."""
    folder = config_folder(config)
    if folder is not None:
        return str(folder / CONFIG)
    return f"{config.model.name or _NAME} {config.model.flavor or _FLAVOR}"


def architecture_key(config: Config) -> str:
    """Return the key that selects the model: the key of a folder with a config.json, or model.flavor."""
    model, options = config.model, config.checkpoint
    if model.name is not None or model.flavor is not None:
        return "model.flavor"
    # If only rank 0 can read the folder, the other nodes cannot take the model from it.
    if options.initial_load_in_hf and options.initial_load_path and not options.initial_load_broadcast:
        return "checkpoint.initial_load_path"
    wanted = options.initial_load_in_hf and not options.initial_load_path
    has_config = (assets_folder(model.hf_assets_path) / CONFIG).is_file()
    return "model.hf_assets_path" if wanted or has_config else "model.flavor"


def attention_name(config: Config, device: str, args: ModelArgs | None) -> str:
    """Return the name of the run's attention backend on a device type, for a model of ``args``."""
    return choose_attention(
        config.model.attention,
        config.model.flavor or "",
        device=device,
        documents=config.data.document_mask,
        prefix=config.finetune.adapter == "prefix_tuning",
        sinks=args is not None and args.sinks,
        cpu_fast_paths=config.training.cpu_fast_paths,
    )


def config_folder(config: Config) -> Path | None:
    """Return the folder whose config.json defines the architecture; None for a preset."""
    key = architecture_key(config)
    if key == "model.flavor":
        return None
    from toolkit.models.on_disk import hugging_face_folder

    return hugging_face_folder(config.value(key))


def weights_folder(config: Config) -> Path | None:
    """Return the Hugging Face folder from which a new run loads weights, or None."""
    options = config.checkpoint
    if not options.enable or not options.initial_load_in_hf:
        return None
    from toolkit.models.on_disk import hugging_face_folder

    return hugging_face_folder(options.initial_load_path or config.model.hf_assets_path)


def pretrained_folder(config: Config) -> Path | None:
    """Return :func:`weights_folder`, or None if the model is excluded from loading."""
    return None if "model" in config.checkpoint.exclude_from_loading else weights_folder(config)
