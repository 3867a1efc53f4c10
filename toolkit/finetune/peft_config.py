"""PEFT's folder of an adapter but for its numbers: adapter_config.json, and which tensors there are under
which names. Imports no torch.

PEFT's prefix and adaption prompt are described in :mod:`toolkit.finetune.peft_folder`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.finetune import Finetune, LlamaAdapter, LoRA, PrefixTuning
from toolkit.errors import DataError, first_few, join_or, quote
from toolkit.finetune.parameters import (
    ALL_LINEAR,
    IN_ATTENTION,
    added_shapes,
    hf_linear_names,
    is_added,
    lora_targets,
)
from toolkit.io.json_fields import Fields, read_object
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.table import EMBEDDING, HEAD
from toolkit.models.parameters import is_classifier_head, linear_layers, parameter_shapes, table
from toolkit.weights.safetensors_header import ITEM_BYTES, ONE_SAVE, file_entries

PEFT_CONFIG = "adapter_config.json"
PEFT_TENSORS = "adapter_model.safetensors"
PROMPTS = "prompt_embeddings"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_ADAPTION = {"prompt": "adaption_prompt", "gate": "adaption_gate"}
_CLASSIFIES = "SEQ_CLS"
"""PEFT's task_type of a classifier."""
_OURS = {"lora": "LORA", "prefix_tuning": "PREFIX_TUNING", "llama_adapter": "ADAPTION_PROMPT"}
_UNKNOWN_FORMS = (
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "fan_in_fan_out",
    "lora_bias",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
)
"""Fields that make another computation of a LoRA than rank, alpha, rsLoRA and DoRA do."""
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights, beside true and false, that leave the base as it is."""
_SHOWN = 6

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in PEFT's folder ``place``: ``options`` that make the like here, and the ``shapes`` of its
    parameters, ours. ``base`` is what PEFT calls its model by, "" where it does not."""

    place: Path
    options: Finetune
    shapes: Shapes
    base: str


def is_peft_folder(folder: Path) -> bool:
    return (folder / PEFT_CONFIG).is_file()


def peft_base(folder: Path) -> str:
    """base_model_name_or_path of a folder, "" where it has none.

    Raises:
        DataError: adapter_config.json is unreadable.
    """
    return str(read_object(folder / PEFT_CONFIG).get("base_model_name_or_path") or "")


def read_peft(folder: Path, args: ModelArgs) -> PeftAdapter:
    """Describe the adapter in ``folder``, for a model of ``args``; reads headers only.

    Raises:
        DataError: the folder is not whole, of a kind or form that there is none of here, or of another model.
    """
    path = folder / PEFT_CONFIG
    values = read_object(path)
    kind = next((ours for ours, theirs in _OURS.items() if theirs == values.get("peft_type")), None)
    if kind is None:
        known = join_or(_OURS.values())
        raise DataError(
            f"{path}: peft_type = {quote(values.get('peft_type'), json.dumps)}: it must be {known}"
        )
    if not (folder / PEFT_TENSORS).is_file():
        instead = " (it has a pickle, which could run code: save the adapter again with PEFT)"
        raise DataError(f"{folder} has no {PEFT_TENSORS}{instead if (folder / _PICKLED).is_file() else ''}")
    if (folder / _PICKLED).is_file():
        raise DataError(f"{folder} holds two saves of an adapter, {PEFT_TENSORS} and {_PICKLED}{ONE_SAVE}")
    if values.get("task_type") == _CLASSIFIES and args.classifier is None:
        raise DataError(f"{folder} is the adapter of a classifier, and the model that it is for here is none")
    entries = file_entries(folder / PEFT_TENSORS)
    if strange := [f"{name} as {it.dtype}" for name, it in entries.items() if it.dtype not in ITEM_BYTES]:
        raise DataError(
            f"{folder / PEFT_TENSORS} holds {first_few(strange, _SHOWN)}; an adapter's tensors must be one "
            f"of {', '.join(ITEM_BYTES)}"
        )
    found = {name: entry.shape for name, entry in entries.items()}
    fields = Fields(values)
    shapes: Shapes
    if kind == "lora":
        shapes = _named(found, args, folder)
        options = _lora(fields, shapes, args)
    elif kind == "prefix_tuning":
        options = _prefix(fields, args)
        shapes = _prefix_shapes(found, options, args, folder)
    else:
        options = _llama_adapter(fields)
        shapes = {
            name: shape[1:] if name.endswith(".prompt") else shape
            for name, shape in _named(found, args, folder).items()
        }
    fields.finish(f"the adapter of {path} cannot be used")
    _check_shapes(shapes, args, options, folder)
    return PeftAdapter(folder, options, shapes, str(values.get("base_model_name_or_path") or ""))


def _lora(fields: Fields, shapes: Shapes, args: ModelArgs) -> Finetune:
    for key in _UNKNOWN_FORMS:
        if fields.values.get(key):
            fields.refuse(key, "changes the computation in a way that there is none of here")
    init = fields.values.get("init_lora_weights", True)
    if not isinstance(init, bool) and str(init).lower() not in _PLAIN_INITS:
        rule = "belongs to a base that PEFT changes as it begins: save it as a plain LoRA"
        other = "path_initial_model_for_weight_conversion"
        fields.refuse("init_lora_weights", f"{rule} ({other}), or merge it there")
    if fields.values.get("bias", "none") != "none":
        fields.refuse("bias", 'must be "none": biases that were trained beside it are not read')
    dropout = fields.values.get("lora_dropout", 0.0)
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        fields.refuse("lora_dropout", "must be a number from 0 to below 1")
        dropout = 0.0
    if args.tie_embeddings and EMBEDDING in shapes:
        fields.refuse("modules_to_save", "PEFT trained the embedding apart from the head, which is tied here")
    modules = {name.rpartition(".")[0] for name in shapes if is_added(name)}
    lora = LoRA(
        rank=fields.count("r"),
        alpha=fields.positive("lora_alpha", 8.0),
        dropout=float(dropout),
        use_rslora=fields.flag("use_rslora"),
        use_dora=fields.flag("use_dora"),
        target_modules=_compact(modules, args, {}),
    )
    # A classifier's head is trained beside any adapter, and not named.
    beside = (name for name in shapes if not is_added(name) and not is_classifier_head(name, args))
    return Finetune(adapter="lora", lora=lora, trainable=sorted(beside))


def _prefix(fields: Fields, args: ModelArgs) -> Finetune:
    if fields.count("num_transformer_submodules", 1) != 1:
        fields.refuse("num_transformer_submodules", "must be 1: a decoder has one")
    if fields.count("num_layers", args.n_layers) != args.n_layers:
        fields.refuse("num_layers", f"the model has {args.n_layers}")
    if args.sliding_window:
        fields.refuse("peft_type", "the window of this model hides PEFT's prefix, and none of ours")
    tokens = PrefixTuning(num_virtual_tokens=fields.count("num_virtual_tokens"))
    return Finetune(adapter="prefix_tuning", prefix_tuning=tokens)


def _llama_adapter(fields: Fields) -> Finetune:
    length, layers = fields.count("adapter_len"), fields.count("adapter_layers")
    options = LlamaAdapter(adapter_len=length, adapter_layers=layers, gate="layer")
    return Finetune(adapter="llama_adapter", llama_adapter=options)


def _prefix_shapes(found: Shapes, options: Finetune, args: ModelArgs, folder: Path) -> Shapes:
    count = options.prefix_tuning.num_virtual_tokens
    due = {PROMPTS: (count, args.n_layers * 2 * args.n_kv_heads * args.head_dim)}
    if dict(found) != due:
        raise DataError(
            f"{folder / PEFT_TENSORS} is not of this model: it has {_told(found)} in place of {_told(due)}"
        )
    return added_shapes(args, options)


def _told(shapes: Shapes) -> str:
    return first_few([f"{name} {shape}" for name, shape in shapes.items()], _SHOWN)


def _named(found: Shapes, args: ModelArgs, folder: Path) -> dict[str, tuple[int, ...]]:
    """``found`` by our names."""
    ours = [f"{module}.{part}" for module in linear_layers(args) for part in _PARTS]
    ours += [f"layers.{layer}{IN_ATTENTION}{part}" for layer in range(args.n_layers) for part in _ADAPTION]
    by_theirs = {to_peft_name(name, args): name for name in [*ours, *parameter_shapes(args)]}
    # As some versions call a magnitude.
    by_theirs |= {
        f"{theirs}.weight": name for theirs, name in by_theirs.items() if theirs.endswith("_vector")
    }
    strange = [name for name in found if name not in by_theirs]
    if strange:
        outside = tuple(f"{to_peft_name(it, args).removesuffix('weight')}lora_" for it in (EMBEDDING, HEAD))
        fix = "LoRA updates linear layers of the blocks alone: have PEFT merge the adapter (merge_and_unload)"
        raise DataError(
            f"{folder / PEFT_TENSORS} holds what this model has no place for: {first_few(strange, _SHOWN)}"
            + (f"\n  fix:  {fix}" if any(name.startswith(outside) for name in strange) else "")
        )
    return {by_theirs[name]: shape for name, shape in found.items()}


def _adaption_name(layer: int, part: str, args: ModelArgs) -> str:
    attention = table(args).to_hf(f"layers.{layer}.attention.wq.weight").removesuffix(".q_proj.weight")
    return f"{attention}.{part}"


def to_peft_name(name: str, args: ModelArgs) -> str:
    """PEFT's name of a parameter that is trained beside a model of ``args``, but for those of a prefix."""
    module, _, part = name.rpartition(".")
    if part in _PARTS:
        theirs = table(args).to_hf(f"{module}.weight").removesuffix("weight")
        return f"{_PREFIX}{theirs}{_PARTS[part]}"
    if IN_ATTENTION in name:
        return _PREFIX + _adaption_name(int(name.split(".", 2)[1]), _ADAPTION[part], args)
    return _PREFIX + table(args).to_hf(name)


def _check_shapes(shapes: Shapes, args: ModelArgs, options: Finetune, folder: Path) -> None:
    due = added_shapes(args, options) | {
        name: shape for name, shape in parameter_shapes(args).items() if name in shapes
    }
    wrong = {
        "missing": [to_peft_name(name, args) for name in due if name not in shapes],
        "too many": [to_peft_name(name, args) for name in shapes if name not in due],
        "of another shape": [
            f"{to_peft_name(name, args)} {shapes[name]} in place of {shape}"
            for name, shape in due.items()
            if shapes.get(name, shape) != shape
        ],
    }
    lines = [f"{what}: {first_few(names, _SHOWN)}" for what, names in wrong.items() if names]
    if lines:
        raise DataError("\n  ".join([f"the adapter in {folder} is not one of this model:", *lines]))


def peft_config(
    args: ModelArgs, options: Finetune, *, base: str | None, replaced: Iterable[str]
) -> dict[str, Any]:
    """Content of adapter_config.json for an adapter; ``replaced`` are parameters of the model itself that
    were trained beside it.

    Raises:
        DataError: PEFT has no such adapter.
    """
    if problem := without_peft_form(args, options, replaced):
        raise DataError(f"PEFT has no form of this adapter: {problem}")
    said: dict[str, Any] = {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "peft_type": _OURS[options.adapter],
        "revision": None,
        "task_type": "CAUSAL_LM" if args.classifier is None else _CLASSIFIES,
    }
    if options.adapter == "lora":
        lora = options.lora
        modules = list(dict.fromkeys(table(args).to_hf(name).rpartition(".")[0] for name in replaced))
        said |= {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            "lora_dropout": lora.dropout,
            "use_rslora": lora.use_rslora,
            "use_dora": lora.use_dora,
            "bias": "none",
            "fan_in_fan_out": False,
            "modules_to_save": modules or None,
            "target_modules": _compact(set(lora_targets(args, options)), args, hf_linear_names(args)),
        }
    elif options.adapter == "prefix_tuning":
        said |= {
            "num_virtual_tokens": options.prefix_tuning.num_virtual_tokens,
            "num_layers": args.n_layers,
            "num_attention_heads": args.n_kv_heads,
            "token_dim": args.n_kv_heads * args.head_dim,
            "num_transformer_submodules": 1,
            "encoder_hidden_size": args.n_kv_heads * args.head_dim,
            "prefix_projection": False,
        }
    else:
        adapter_options = options.llama_adapter
        said |= {
            "adapter_len": adapter_options.adapter_len,
            "adapter_layers": min(adapter_options.adapter_layers, args.n_layers),
            "target_modules": "self_attn",
        }
    return said


def without_peft_form(args: ModelArgs, options: Finetune, replaced: Iterable[str] = ()) -> str:
    """Why PEFT cannot hold an adapter; "" where it can."""
    if options.adapter == "prefix_tuning" and args.sliding_window:
        return "the window of this model would hide its prefix, and hides none of ours"
    if options.adapter == "llama_adapter" and options.llama_adapter.gate == "head":
        return 'its gate is one for each head, as in the paper (finetune.llama_adapter.gate = "head")'
    if options.adapter == "llama_adapter" and (
        args.qk_norm or args.qkv_bias or args.n_heads * args.head_dim != args.dim
    ):
        return "its adaption prompts are for heads without norms and biases that share dim among them"
    if options.adapter != "lora" and args.classifier is not None:
        return "a classifier's head is trained beside it"
    if options.adapter != "lora" and (options.trainable or list(replaced)):
        return "parameters of the model are trained beside it (finetune.trainable)"
    kinds: dict[str, set[str]] = {}
    targets = lora_targets(args, options) if options.adapter == "lora" else []
    for name in replaced:
        module, _, kind = name.rpartition(".")
        kinds.setdefault(module, set()).add(kind)
    if both := [module for module in targets if "weight" in kinds.get(module, ())]:
        return (
            f"it updates a layer or keeps it whole, and {both[0]} is trained both ways (finetune.trainable)"
        )
    if args.tie_embeddings and "tok_embeddings" in kinds:
        return "it would leave the head, which is tied to the embedding, untrained (finetune.trainable)"
    biased = {name.removesuffix(".bias") for name in parameter_shapes(args) if name.endswith(".bias")}
    if partly := [module for module, found in kinds.items() if module in biased and len(found) == 1]:
        module = min(partly)
        [kind] = kinds[module]
        return f"it keeps whole modules, and of {module} the {kind} alone is trained (finetune.trainable)"
    return ""


def _compact(modules: set[str], args: ModelArgs, their_names: Mapping[str, str]) -> list[str]:
    """Names that stand for ``modules``: last names where all of a name are among them, else whole ones; in
    Hugging Face's words where ``their_names`` has them."""
    layers = list(linear_layers(args))
    by_last: dict[str, set[str]] = {}
    for layer in layers:
        by_last.setdefault(layer.rpartition(".")[2], set()).add(layer)
    if modules == set(layers) and not their_names:
        return [ALL_LINEAR]
    if all(names <= modules or not names & modules for names in by_last.values()):
        return [their_names.get(last, last) for last, names in by_last.items() if names <= modules]
    if not their_names:
        return sorted(modules, key=layers.index)
    to_hf = table(args).to_hf
    return [to_hf(f"{name}.weight").removesuffix(".weight") for name in sorted(modules, key=layers.index)]
