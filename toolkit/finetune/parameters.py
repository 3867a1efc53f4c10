"""Names and shapes of parameters added by fine-tuning, and names of trained parameters. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from toolkit.config.finetune import Finetune
from toolkit.config.name_patterns import matches_any, unmatched
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING, HEAD, ParameterRow
from toolkit.models.parameters import adaptable, is_classifier_head, parameter_shapes, table

_LORA = ("lora_a", "lora_b", "magnitude")
TOKEN_ROWS = "tok_embeddings.token_rows"
"""Rows of the embedding trained together with LoRA."""
IN_ATTENTION = ".attention.adapter."
ALL_LINEAR, EXPERTS = "all-linear", "experts"
"""Targets of LoRA: all linear layers and experts of the blocks; all weights of routed experts."""
NF4_BLOCK = 64
"""Elements of a row that share a scale in an NF4 base; bitsandbytes' default."""

Shapes = dict[str, tuple[int, ...]]


def is_added(name: str) -> bool:
    """Return whether the parameter ``name`` belongs to an adapter."""
    return name.rpartition(".")[2].endswith(_LORA) or IN_ATTENTION in name or name == TOKEN_ROWS


def updates_embedding(name: str) -> bool:
    """Return whether the parameter ``name`` belongs to LoRA's update of the embedding."""
    return name.startswith("tok_embeddings.lora_")


def added_name(row: ParameterRow, part: str) -> str:
    """Return the name of LoRA's parameter ``part`` of a weight, such as attention.wq.lora_a."""
    return f"{row.name}_{part}" if row.experts else f"{row.module}.{part}"


def added_shapes(args: ModelArgs, options: Finetune) -> Shapes:
    """Return the shapes of the parameters that the adapter of ``options`` adds, by name."""
    return {"lora": _lora, "prefix_tuning": _prefix, "llama_adapter": _llama_adapter}.get(
        options.adapter, lambda args, options: {}
    )(args, options)


def all_shapes(args: ModelArgs, options: Finetune) -> Shapes:
    """Return the shapes of all parameters of the fine-tuned model, by name."""
    return parameter_shapes(args) | added_shapes(args, options)


def trained_names(names: Iterable[str], args: ModelArgs, options: Finetune) -> set[str]:
    """Return the ``names`` of trained parameters: the adapter's, and the model's that patterns select.

    With an adapter, the model is frozen except for ``trainable`` and a classification head.
    """
    first, last = options.freeze_first_layers, args.n_layers - options.freeze_last_layers
    rows = table(args)

    def is_trained(name: str) -> bool:
        if is_added(name):
            return True
        if rows[name].buffer:
            return False
        selected = not (options.adds or options.trainable) or matches_any(name, options.trainable)
        selected = selected or (options.adds and is_classifier_head(name, args))
        if not selected or matches_any(name, options.frozen):
            return False
        block = rows[name].block
        return first <= block < last if block is not None else not (first and name == EMBEDDING)

    return {name for name in names if is_trained(name)}


def count_trained(args: ModelArgs, options: Finetune) -> tuple[int, int]:
    """Return the numbers of trained and of all parameters."""
    sizes = {name: math.prod(shape) for name, shape in all_shapes(args, options).items()}
    return sum(sizes[name] for name in trained_names(sizes, args, options)), sum(sizes.values())


def describe_trained(args: ModelArgs, options: Finetune, *, bytes_each: int = 0) -> str:
    """Describe the trained parameters: "4,194,304 of 6,742,609,920 parameters (0.062%)"; with ``bytes_each``,
    also the size of an adapter."""
    trained, total = count_trained(args, options)
    size = f", adapter of {trained * bytes_each:,} bytes" if options.adds and bytes_each else ""
    return f"{trained:,} of {total:,} parameters ({trained / total:.3%}){size}"


def lora_targets(args: ModelArgs, options: Finetune) -> list[str]:
    """Return the names of the weights that LoRA updates, in the model's order: linear layers, and stacked
    experts, such as layers.0.moe.experts.w1, and the embedding and head of a model that does not tie them.

    Targets are the last components of names, ours or Hugging Face's, or patterns of full names. "all-linear"
    does not include routers, embedding and head, and patterns not the latter two.
    """
    patterns, hf_names = options.lora.target_modules, hf_linear_names(args)
    selected = {name for name, hf_name in hf_names.items() if {name, hf_name} & set(patterns)}

    def is_target(name: str, row: ParameterRow) -> bool:
        if (ALL_LINEAR in patterns and row.is_block_matrix) or (EXPERTS in patterns and row.experts):
            return True
        named = name.rpartition(".")[2] in selected
        return named if row.outer else named or matches_any(name, patterns)

    return [name for name, row in adaptable(args).items() if is_target(name, row)]


def idle_targets(args: ModelArgs, patterns: Iterable[str]) -> list[str]:
    """Return ``patterns`` that match nothing that LoRA may update."""
    known = {ALL_LINEAR, *(name for pair in hf_linear_names(args).items() for name in pair)}
    known |= {EXPERTS} if any(row.experts for row in adaptable(args).values()) else set()
    return unmatched((pattern for pattern in patterns if pattern not in known), adaptable(args))


def fixed_ends(args: ModelArgs) -> list[str]:
    """Return the names of the weights of embedding and head that LoRA cannot update: those of a model that
    ties them, and a classifier's head."""
    return [name for name in (EMBEDDING, HEAD) if name.removesuffix(".weight") not in adaptable(args)]


def fixed_end(args: ModelArgs, pattern: str) -> str | None:
    """Return the name in :func:`fixed_ends` that a LoRA target matches, in either naming."""
    for name in fixed_ends(args):
        modules = [it.removesuffix(".weight") for it in (name, table(args).to_hf(name))]
        if any(matches_any(module, [pattern]) for module in (*modules, modules[1].rpartition(".")[2])):
            return name
    return None


def hf_linear_names(args: ModelArgs) -> Mapping[str, str]:
    """Map our names of the weights that LoRA may update, without their block, to Hugging Face's: wq to
    q_proj."""
    return {
        name.rpartition(".")[2]: row.hf.removesuffix(".weight").rpartition(".")[2]
        for name, row in adaptable(args).items()
    }


def _lora(args: ModelArgs, options: Finetune) -> Shapes:
    added: Shapes = {}
    for target in lora_targets(args, options):
        row = adaptable(args)[target]
        *experts, rows, columns = row.shape
        added[added_name(row, "lora_a")] = (*experts, options.lora.rank, columns)
        added[added_name(row, "lora_b")] = (*experts, rows, options.lora.rank)
        if options.lora.use_dora:
            added[added_name(row, "magnitude")] = (*experts, rows)
    if options.trainable_token_indices:
        added[TOKEN_ROWS] = (len(options.trainable_token_indices), args.dim)
    return added


def _prefix(args: ModelArgs, options: Finetune) -> Shapes:
    shape = (args.n_kv_heads, options.prefix_tuning.num_virtual_tokens, args.head_dim)
    return {
        f"layers.{layer}{IN_ATTENTION}{part}": shape
        for layer in range(args.n_layers)
        for part in ("keys", "values")
    }


def adapted_layers(args: ModelArgs, options: Finetune) -> range:
    """Return the blocks with a LLaMA-Adapter."""
    return range(max(0, args.n_layers - options.llama_adapter.adapter_layers), args.n_layers)


def _llama_adapter(args: ModelArgs, options: Finetune) -> Shapes:
    adapter = options.llama_adapter
    gates = args.n_heads if adapter.gate == "head" else 1
    return {
        f"layers.{layer}{IN_ATTENTION}{part}": shape
        for layer in adapted_layers(args, options)
        for part, shape in (("prompt", (adapter.adapter_len, args.dim)), ("gate", (gates,)))
    }
