"""The configs and tensor names of PEFT folders. Imports no torch.

:mod:`toolkit.finetune.peft_folder` converts their tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.finetune import Finetune, LlamaAdapter, LoRA, PrefixTuning
from toolkit.errors import DataError, first_few, join_or, quote
from toolkit.finetune.parameters import (
    ALL_LINEAR,
    IN_ATTENTION,
    TOKEN_ROWS,
    added_name,
    added_shapes,
    fixed_ends,
    is_added,
    lora_targets,
    updates_embedding,
)
from toolkit.finetune.peft_experts import (
    GATE_UP,
    FusedExperts,
    alpha_factor,
    block_patterns,
    doubled_rank,
    fused_experts,
    targeted_experts,
)
from toolkit.io.json_fields import Fields, is_size, read_object
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING, HEAD, ParameterRow
from toolkit.models.parameters import adaptable, is_classifier_head, parameter_shapes, table
from toolkit.weights.safetensors_header import ITEM_BYTES, ONE_SAVE, file_entries

PEFT_CONFIG = "adapter_config.json"
PEFT_TENSORS = "adapter_model.safetensors"
PROMPTS = "prompt_embeddings"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_TOKEN_ROWS = "token_adapter.trainable_tokens_delta"
# PEFT updates the transpose of an embedding.
_EMBEDDING_PARTS = _PARTS | {"lora_a": "lora_embedding_B", "lora_b": "lora_embedding_A"}
_ADAPTION = {"prompt": "adaption_prompt", "gate": "adaption_gate"}
_CLASSIFIES = "SEQ_CLS"
"""PEFT's task_type of a classifier."""
_PEFT_TYPES = {"lora": "LORA", "prefix_tuning": "PREFIX_TUNING", "llama_adapter": "ADAPTION_PROMPT"}
_UNSUPPORTED = (
    "layer_replication",
    "fan_in_fan_out",
    "lora_bias",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "megatron_config",
)
"""Fields that change a LoRA's computation in unsupported ways."""
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights, besides booleans, that leave the base unchanged."""
_SHOWN = 6  # names in a message

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter in the PEFT folder ``place``: equivalent ``options``, the ``shapes`` of its parameters by
    our names, the ``keys`` of their tensors, the parameters in which its ``experts`` are fused, and the path
    or id of its ``base`` in PEFT's config, or ""."""

    place: Path
    options: Finetune
    shapes: Shapes
    keys: Mapping[str, str]
    experts: Sequence[FusedExperts]
    base: str


def is_peft_folder(folder: Path) -> bool:
    return (folder / PEFT_CONFIG).is_file()


def peft_base(folder: Path) -> str:
    """Return base_model_name_or_path of a folder, or "".

    Raises:
        DataError: adapter_config.json cannot be read.
    """
    return str(read_object(folder / PEFT_CONFIG).get("base_model_name_or_path") or "")


def read_peft(folder: Path, args: ModelArgs) -> PeftAdapter:
    """Read the config and headers of the adapter in ``folder``, for a model of ``args``.

    Raises:
        DataError: the folder is incomplete, its adapter type is unsupported, or it is for another model.
    """
    path = folder / PEFT_CONFIG
    values = read_object(path)
    kind = next((it for it, peft_type in _PEFT_TYPES.items() if peft_type == values.get("peft_type")), None)
    if kind is None:
        known = join_or(_PEFT_TYPES.values())
        raise DataError(
            f"{path}: peft_type = {quote(values.get('peft_type'), json.dumps)}: it must be {known}"
        )
    if not (folder / PEFT_TENSORS).is_file():
        hint = " (it has a pickle, which could execute code: save the adapter again with PEFT)"
        raise DataError(f"{folder} has no {PEFT_TENSORS}{hint if (folder / _PICKLED).is_file() else ''}")
    if (folder / _PICKLED).is_file():
        raise DataError(f"{folder} has an adapter in two formats, {PEFT_TENSORS} and {_PICKLED}{ONE_SAVE}")
    if values.get("task_type") == _CLASSIFIES and args.classifier is None:
        raise DataError(f"{folder} is the adapter of a classifier, but the model is not a classifier")
    entries = file_entries(folder / PEFT_TENSORS)
    if wrong := [f"{name} as {it.dtype}" for name, it in entries.items() if it.dtype not in ITEM_BYTES]:
        raise DataError(
            f"{folder / PEFT_TENSORS} has {first_few(wrong, _SHOWN)}; an adapter's tensors must be one of "
            f"{', '.join(ITEM_BYTES)}"
        )
    found = {name: entry.shape for name, entry in entries.items()}
    fields = Fields(values)
    shapes: Shapes
    experts: list[FusedExperts] = []
    if kind == "lora":
        targets = targeted_experts(args, values.get("target_parameters"))
        experts = fused_experts(args, targets, blocks=doubled_rank(values) == GATE_UP)
    keys = {} if kind == "prefix_tuning" else _keys(found, args, experts, folder)
    if kind == "lora":
        shapes = _our_shapes(found, keys, experts)
        if _is_padded(values):
            shapes = {name: _padded(name, shape, values["r"]) for name, shape in shapes.items()}
        options = _lora(fields, shapes, args)
    elif kind == "prefix_tuning":
        options = _prefix(fields, args)
        shapes = _prefix_shapes(found, options, args, folder)
    else:
        options = _llama_adapter(fields)
        shapes = {
            name: found[key][1:] if name.endswith(".prompt") else found[key] for name, key in keys.items()
        }
    fields.finish(f"the adapter of {path} cannot be used")
    _check_shapes(shapes, args, options, folder)
    return PeftAdapter(
        folder, options, shapes, keys, experts, str(values.get("base_model_name_or_path") or "")
    )


def _lora(fields: Fields, shapes: Shapes, args: ModelArgs) -> Finetune:
    for key in _UNSUPPORTED:
        if fields.values.get(key):
            fields.reject(key, "changes the computation in an unsupported way")
    for key in ("rank_pattern", "alpha_pattern"):
        if fields.values.get(key) and doubled_rank(fields.values) is None:
            fields.reject(key, "may only double the rank of gate_up_proj at the same scale")
    init = fields.values.get("init_lora_weights", True)
    if not isinstance(init, bool) and str(init).lower() not in _PLAIN_INITS:
        rule = "changes the base's weights: save it as a plain LoRA with PEFT"
        other = "path_initial_model_for_weight_conversion"
        fields.reject("init_lora_weights", f"{rule} ({other}), or merge it with PEFT")
    if fields.values.get("bias", "none") != "none":
        fields.reject("bias", 'must be "none": trained biases are not supported')
    dropout = fields.values.get("lora_dropout", 0.0)
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        fields.reject("lora_dropout", "must be a number from 0 to below 1")
        dropout = 0.0
    if args.tie_embeddings and EMBEDDING in shapes:
        fields.reject("modules_to_save", "PEFT trained the embedding without the head, but they are tied")
    targets = {it for it, row in adaptable(args).items() if added_name(row, "lora_a") in shapes}
    if fields.values.get("use_dora") and any(adaptable(args)[it].outer for it in targets):
        fields.reject("use_dora", "DoRA of the embedding and the head is not supported")
    rank, alpha, use_rslora = fields.count("r"), fields.positive("lora_alpha", 8.0), fields.flag("use_rslora")
    if _is_padded(fields.values):
        rank, alpha = 2 * rank, alpha * alpha_factor(use_rslora=use_rslora)
    lora = LoRA(
        rank=rank,
        alpha=alpha,
        dropout=float(dropout),
        use_rslora=use_rslora,
        use_dora=fields.flag("use_dora"),
        target_modules=_compact(targets, args),
    )
    # A classification head is always trained, even if it is not listed.
    others = (name for name in shapes if not is_added(name) and not is_classifier_head(name, args))
    return Finetune(
        adapter="lora",
        lora=lora,
        trainable=sorted(others),
        trainable_token_indices=_token_indices(fields, args),
    )


def _token_indices(fields: Fields, args: ModelArgs) -> list[int]:
    """Return the tokens whose rows of the embedding are trained; in PEFT, a list or lists by module."""
    key = "trainable_token_indices"
    found = fields.values.get(key) or []
    if isinstance(found, dict):
        lists = {name.rpartition(".")[2]: value for name, value in found.items()}
        embedding, head = (table(args).to_hf(name).split(".")[-2] for name in (EMBEDDING, HEAD))
        found = lists.pop(embedding, None)
        if args.tie_embeddings and lists.get(head) == found:
            lists.pop(head, None)
        if lists:
            fields.reject(key, f"may have only rows of {embedding}, and the same of a tied {head}")
            return []
    is_valid = isinstance(found, list) and all(map(is_size, found)) and len(set(found)) == len(found)
    if not is_valid or max(found, default=0) >= args.vocab_size:
        fields.reject(key, f"must be different tokens below {args.vocab_size}, the size of the vocabulary")
        return []
    return list(found)


def _is_padded(values: Mapping[str, Any]) -> bool:
    """Return whether all updates have the rank that PEFT gave only to gate_up_proj."""
    return doubled_rank(values) not in (None, GATE_UP)


def _padded(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    dim = len(shape) - (2 if name.endswith("lora_a") else 1)
    is_rank = name.endswith(("lora_a", "lora_b")) and shape[dim] == rank
    return (*shape[:dim], 2 * rank, *shape[dim + 1 :]) if is_rank else shape


def _prefix(fields: Fields, args: ModelArgs) -> Finetune:
    if fields.count("num_transformer_submodules", 1) != 1:
        fields.reject("num_transformer_submodules", "must be 1: a decoder has one")
    if fields.count("num_layers", args.n_layers) != args.n_layers:
        fields.reject("num_layers", f"the model has {args.n_layers}")
    if args.sliding_window:
        fields.reject(
            "peft_type", "PEFT applies the model's sliding window to the prefix, this toolkit does not"
        )
    tokens = PrefixTuning(num_virtual_tokens=fields.count("num_virtual_tokens"))
    return Finetune(adapter="prefix_tuning", prefix_tuning=tokens)


def _llama_adapter(fields: Fields) -> Finetune:
    length, layers = fields.count("adapter_len"), fields.count("adapter_layers")
    options = LlamaAdapter(adapter_len=length, adapter_layers=layers, gate="layer")
    return Finetune(adapter="llama_adapter", llama_adapter=options)


def _prefix_shapes(found: Shapes, options: Finetune, args: ModelArgs, folder: Path) -> Shapes:
    count = options.prefix_tuning.num_virtual_tokens
    expected = {PROMPTS: (count, args.n_layers * 2 * args.n_kv_heads * args.head_dim)}
    if dict(found) != expected:
        raise DataError(
            f"{folder / PEFT_TENSORS} is of another model: it has {_describe(found)} instead of "
            f"{_describe(expected)}"
        )
    return added_shapes(args, options)


def _describe(shapes: Shapes) -> str:
    return first_few([f"{name} {shape}" for name, shape in shapes.items()], _SHOWN)


def _keys(found: Shapes, args: ModelArgs, experts: Sequence[FusedExperts], folder: Path) -> dict[str, str]:
    """Map our names of the parameters in ``found`` to the keys there."""
    names = [f"{it}.{part}" for it, row in adaptable(args).items() if not row.experts for part in _PARTS]
    names += [f"layers.{layer}{IN_ATTENTION}{part}" for layer in range(args.n_layers) for part in _ADAPTION]
    names.append(TOKEN_ROWS)
    keys = {name: to_peft_name(name, args) for name in [*names, *parameter_shapes(args)]}
    # Some versions of PEFT add a suffix to magnitudes.
    keys = {
        name: it if it in found or not it.endswith("_vector") else f"{it}.weight" for name, it in keys.items()
    }
    keys |= expert_keys(experts)
    # PEFT also saves the base weights of an adapted embedding and head, in case the vocabulary was resized.
    outer = {
        f"{_PREFIX}{_hf_module(it)}.base_layer.weight": it for it in adaptable(args).values() if it.outer
    }
    copies = {key for key, row in outer.items() if found.get(key) == row.shape}
    unknown = sorted(found.keys() - keys.values() - copies)
    if unknown:
        outside = tuple(f"{to_peft_name(it, args).removesuffix('weight')}lora_" for it in fixed_ends(args))
        fix = (
            "LoRA updates no tied embedding or head, and no classifier's head: merge the adapter into an "
            "untied model with PEFT (merge_and_unload)"
        )
        raise DataError(
            f"{folder / PEFT_TENSORS} has tensors that this model lacks: {first_few(unknown, _SHOWN)}"
            + (f"\n  fix:  {fix}" if any(name.startswith(outside) for name in unknown) else "")
        )
    return {name: key for name, key in keys.items() if key in found}


def expert_keys(experts: Sequence[FusedExperts]) -> dict[str, str]:
    """Map our names of the adapted experts' parameters to their keys in a PEFT folder."""
    return {name: _PREFIX + it.key(part) for it in experts for name, (_, part) in it.names.items()}


def _our_shapes(found: Shapes, keys: Mapping[str, str], experts: Sequence[FusedExperts]) -> Shapes:
    of_experts = {name: (it, part) for it in experts for name, (_, part) in it.names.items()}
    shapes = {}
    for name, key in keys.items():
        shapes[name] = found[key][::-1] if updates_embedding(name) else found[key]
        if name in of_experts:
            fused, part = of_experts[name]
            shapes[name] = fused.our_shape(part, found[key])
    return shapes


def _adaption_name(layer: int, part: str, args: ModelArgs) -> str:
    attention = table(args).to_hf(f"layers.{layer}.attention.wo.weight").removesuffix(".o_proj.weight")
    return f"{attention}.{part}"


def to_peft_name(name: str, args: ModelArgs) -> str:
    """Return PEFT's name of a trained parameter, except those of a prefix and of experts."""
    module, _, part = name.rpartition(".")
    if name == TOKEN_ROWS:
        return _PREFIX + table(args).to_hf(EMBEDDING).removesuffix("weight") + _TOKEN_ROWS
    if part in _PARTS:
        parts = _EMBEDDING_PARTS if updates_embedding(name) else _PARTS
        return f"{_PREFIX}{_hf_module(adaptable(args)[module])}.{parts[part]}"
    if IN_ATTENTION in name:
        return _PREFIX + _adaption_name(int(name.split(".", 2)[1]), _ADAPTION[part], args)
    return _PREFIX + table(args).to_hf(name)


def _hf_module(row: ParameterRow) -> str:
    """Return transformers' name in memory of a linear layer, router, embedding or head."""
    return f"model.layers.{row.block}.mlp.gate" if row.router else row.hf.removesuffix(".weight")


def _check_shapes(shapes: Shapes, args: ModelArgs, options: Finetune, folder: Path) -> None:
    expected = added_shapes(args, options) | {
        name: shape for name, shape in parameter_shapes(args).items() if name in shapes
    }
    keys = expert_keys(fused_experts(args, adaptable(args)))

    def key(name: str) -> str:
        return keys.get(name) or to_peft_name(name, args)

    wrong = {
        "missing": [key(name) for name in expected if name not in shapes],
        "unexpected": [key(name) for name in shapes if name not in expected],
        "of another shape": [
            f"{key(name)} {shapes[name]} instead of {shape}"
            for name, shape in expected.items()
            if shapes.get(name, shape) != shape
        ],
    }
    lines = [f"{what}: {first_few(names, _SHOWN)}" for what, names in wrong.items() if names]
    if lines:
        raise DataError("\n  ".join([f"the adapter in {folder} is of another model:", *lines]))


def peft_config(
    args: ModelArgs, options: Finetune, *, base: str | None, replaced: Collection[str]
) -> dict[str, Any]:
    """Build adapter_config.json for an adapter; ``replaced`` are model parameters that were trained too.

    Raises:
        DataError: PEFT does not support the adapter.
    """
    if problem := unsupported_by_peft(args, options, replaced):
        raise DataError(f"PEFT does not support this adapter: {problem}")
    config: dict[str, Any] = {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "peft_type": _PEFT_TYPES[options.adapter],
        "revision": None,
        "task_type": "CAUSAL_LM" if args.classifier is None else _CLASSIFIES,
    }
    if options.adapter == "lora":
        lora = options.lora
        modules = list(dict.fromkeys(table(args).to_hf(name).rpartition(".")[0] for name in replaced))
        linear, parameters = _peft_targets(args, options)
        experts = fused_experts(args, lora_targets(args, options))
        config |= {
            "r": lora.rank,
            "lora_alpha": lora.alpha,
            # PEFT has no dropout in updates of parameters.
            "lora_dropout": 0.0 if parameters else lora.dropout,
            "use_rslora": lora.use_rslora,
            "use_dora": lora.use_dora,
            "bias": "none",
            "fan_in_fan_out": False,
            "modules_to_save": modules or None,
            "target_modules": linear,
        }
        if options.trainable_token_indices:
            config["trainable_token_indices"] = options.trainable_token_indices
        if parameters:
            config["target_parameters"] = parameters
        if any(len(it.rows) > 1 for it in experts):
            config |= block_patterns(lora)
    elif options.adapter == "prefix_tuning":
        config |= {
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
        config |= {
            "adapter_len": adapter_options.adapter_len,
            "adapter_layers": min(adapter_options.adapter_layers, args.n_layers),
            "target_modules": "self_attn",
        }
    return config


def unsupported_by_peft(args: ModelArgs, options: Finetune, replaced: Collection[str] = ()) -> str:
    """Return why PEFT does not support an adapter, or ""."""
    if options.adapter == "prefix_tuning" and args.sliding_window:
        return "it would apply the model's sliding window to the prefix, which this toolkit does not"
    if options.adapter == "llama_adapter" and options.llama_adapter.gate == "head":
        return 'it has one gate per head, as in the paper (finetune.llama_adapter.gate = "head")'
    if options.adapter == "llama_adapter" and (
        args.qk_norm or args.qkv_bias or args.n_heads * args.head_dim != args.dim
    ):
        return "its adaption prompts require heads of dim / n_heads without norms and biases"
    if options.adapter != "lora" and args.classifier is not None:
        return "a classification head is trained too"
    if options.adapter != "lora" and (options.trainable or list(replaced)):
        return "parameters of the model are trained too (finetune.trainable)"
    rows = table(args)
    if experts := [name for name in replaced if name in rows and rows[name].experts]:
        return f"it cannot save experts, such as {experts[0]} (finetune.trainable)"
    kinds: dict[str, set[str]] = {}
    targets = lora_targets(args, options) if options.adapter == "lora" else []
    if targets and options.lora.use_dora and (parameters := _peft_targets(args, options)[1]):
        return f"it has no DoRA of {parameters[0]} (finetune.lora.use_dora)"
    for name in replaced:
        module, _, kind = name.rpartition(".")
        kinds.setdefault(module, set()).add(kind)
    if both := [module for module in targets if "weight" in kinds.get(module, ())]:
        return f"it cannot both update and replace a layer, such as {both[0]} (finetune.trainable)"
    if args.tie_embeddings and "tok_embeddings" in kinds:
        return "it would not train the head, which is tied to the embedding (finetune.trainable)"
    biased = {name.removesuffix(".bias") for name in parameter_shapes(args) if name.endswith(".bias")}
    if partly := [module for module, found in kinds.items() if module in biased and len(found) == 1]:
        module = min(partly)
        [kind] = kinds[module]
        return f"it saves entire modules, but only the {kind} of {module} is trained (finetune.trainable)"
    return ""


def _peft_targets(args: ModelArgs, options: Finetune) -> tuple[list[str], list[str]]:
    """Return PEFT's ``target_modules`` and ``target_parameters``.

    With transformers 5, PEFT 0.21 confuses a module whose name ends like an expert's matrix, such as
    gate_proj, with the experts. Such a layer, and a router, is therefore targeted by its weight.
    """
    rows, targets = adaptable(args), lora_targets(args, options)
    of_experts = {row.hf.split(".")[-2] for row in rows.values() if row.experts}
    modules = {it: _hf_module(row) for it, row in rows.items() if row.linear or row.outer}
    modules = {it: name for it, name in modules.items() if name.rpartition(".")[2] not in of_experts}
    parameters = [
        f"{_hf_module(rows[it])}.weight" for it in targets if not rows[it].experts and it not in modules
    ]
    parameters += [it.parameter for it in fused_experts(args, targets)]
    return _shortest([it for it in targets if it in modules], modules), parameters


def _compact(targets: set[str], args: ModelArgs) -> list[str]:
    """Return the shortest ``finetune.lora.target_modules`` for ``targets``."""
    rows = adaptable(args)
    if targets == {name for name, row in rows.items() if row.is_block_matrix}:
        return [ALL_LINEAR]
    return _shortest([name for name in rows if name in targets], dict(zip(rows, rows, strict=True)))


def _shortest(targets: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Return the last components of the ``names`` of ``targets`` if these are all layers with those names,
    otherwise full names."""
    by_last: dict[str, set[str]] = {}
    for layer in names:
        by_last.setdefault(layer.rpartition(".")[2], set()).add(layer)
    chosen = set(targets)
    if all(layers <= chosen or not layers & chosen for layers in by_last.values()):
        return [names[min(layers)].rpartition(".")[2] for layers in by_last.values() if layers <= chosen]
    return [names[it] for it in targets]
