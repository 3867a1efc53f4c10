"""The model that a configuration means: a preset by name, or what a config.json says. Imports no torch.

``model.name`` and ``model.flavor`` name a preset. Where neither is set, the architecture is that of the
Hugging Face folder that the run starts from (``checkpoint.initial_load_in_hf``), else of the config.json in
``model.hf_assets_path`` if there is one, else llama3 debugmodel. The keys ``model.*`` change either.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.models.common.args import Classifier, ModelArgs, changed, takes_vocabulary
from toolkit.models.common.attention_choice import attention_choice
from toolkit.models.common.spec import CONFIG
from toolkit.models.registry import resolve

_NAME, _FLAVOR = "llama3", "debugmodel"


def model_args(config: Config, *, tokenizer_vocab: int | None) -> ModelArgs:
    """The shape of the model; a debugmodel has the vocabulary ``tokenizer_vocab``.

    Raises:
        ConfigError: the preset does not exist, or values of ``model.*`` contradict one another.
        DataError: the config.json is of no model that is known.
    """
    model = config.model
    folder = config_folder(config)
    if folder is not None:
        from toolkit.models.on_disk import read_hf_config

        args = changed(read_hf_config(folder), **model.overrides())
    else:
        name, flavor = model.name or _NAME, model.flavor or _FLAVOR
        args = resolve(name, flavor, tokenizer_vocab=tokenizer_vocab, **model.overrides())
    asked = config.finetune.classification
    if not asked.num_labels:
        return args
    classifier = Classifier(asked.names, tuple(asked.hidden_sizes))
    return replace(args, classifier=classifier, tie_embeddings=False)


def needs_tokenizer(config: Config) -> bool:
    """Say if the shape of the model is known only with its tokenizer."""
    named = config_folder(config) is None and takes_vocabulary(config.model.flavor or _FLAVOR)
    return named and config.model.vocab_size is None


def model_named(config: Config) -> str:
    """Name the model: "llama3.1 8B", or the config.json that describes it."""
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
    has_config = (expand_user(model.hf_assets_path) / CONFIG).is_file()
    return "model.hf_assets_path" if wanted or has_config else "model.flavor"


def attention_named(config: Config, device: str) -> str:
    """Name the attention back end that a run takes on a type of device."""
    return attention_choice(
        config.model.attention,
        config.model.flavor or "",
        device=device,
        documents=config.data.document_mask,
        prefix=config.finetune.adapter == "prefix_tuning",
        cpu_fast_paths=config.training.cpu_fast_paths,
    )


def config_folder(config: Config) -> Path | None:
    """The folder whose config.json is the architecture; None where a preset is."""
    key = architecture_key(config)
    if key == "model.flavor":
        return None
    from toolkit.models.on_disk import hugging_face_folder

    return hugging_face_folder(config.value(key))


def weights_folder(config: Config) -> Path | None:
    """The Hugging Face folder whose weights a new run takes; None where it takes none."""
    options = config.checkpoint
    if not options.enable or not options.initial_load_in_hf:
        return None
    from toolkit.models.on_disk import hugging_face_folder

    return hugging_face_folder(options.initial_load_path or config.model.hf_assets_path)


def pretrained_folder(config: Config) -> Path | None:
    """The folder of :func:`weights_folder`, save where the model is excluded from loading."""
    return None if "model" in config.checkpoint.exclude_from_loading else weights_folder(config)
