"""Apply the changes for fine-tuning to a model, in order, before it is sharded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from toolkit.config.finetune import Finetune
from toolkit.errors import ConfigError, Problem
from toolkit.finetune.parameters import adapted_layers, lora_targets, trained_names, updates_embedding
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameter_table import EMBEDDING, HEAD, Init
from toolkit.models.parameters import linear_layers


def apply_finetune(model: Decoder, options: Finetune, *, frozen_dtype: torch.dtype) -> None:
    """Add the adapter of ``options`` to ``model``, or a stage of it, and freeze parameters; on the meta
    device, in place.

    With an adapter, frozen parameters are stored in ``frozen_dtype``, the compute dtype to which FSDP would
    cast them anyway, or in 4 bits for linear layers and experts. These are not saved in checkpoints.
    """
    args = model.args
    if options.adapter == "lora":
        from toolkit.finetune.lora import apply_lora
        from toolkit.finetune.lora_experts import apply_lora_to_experts

        targets = lora_targets(args, options)
        apply_lora(model, targets, options.lora)
        apply_lora_to_experts(model, targets, options.lora)
        if options.trainable_token_indices:
            from toolkit.finetune.token_rows import apply_token_rows

            apply_token_rows(model, options.trainable_token_indices)
    elif options.adds:
        apply_to_attention(model, args, options)
    named = dict(model.named_parameters())
    # A pipeline's copy of a tied embedding is trained if the embedding is.
    tied = {HEAD: EMBEDDING} if args.tie_embeddings else {}
    trained = trained_names({tied.get(name, name) for name in named}, args, options)
    for name in named:
        if tied.get(name, name) in trained:
            continue
        named[name].requires_grad_(False)
        if options.adds:
            module, _, attribute = name.rpartition(".")
            frozen = torch.nn.Parameter(named[name].to(frozen_dtype), requires_grad=False)
            model.get_submodule(module).register_parameter(attribute, frozen)
    if options.quantizes:
        from toolkit.finetune.lora_experts import apply_nf4_to_experts
        from toolkit.finetune.nf4 import apply_nf4

        apply_nf4(model, linear_layers(args))
        apply_nf4_to_experts(model, options.lora)


def apply_to_attention(model: Decoder, args: ModelArgs, options: Finetune) -> None:
    """Add an adapter to the attention of the blocks, on the meta device, in place.

    Raises:
        ConfigError: the model has attention sinks or chunks.
    """
    if args.sinks or args.irope:
        what = "attention sinks" if args.sinks else "chunks of attention"
        rule, fix = f"{what} support no learned keys", 'use finetune.adapter = "lora"'
        raise ConfigError(Problem(rule, fix, "finetune.adapter", options.adapter))
    if options.adapter == "prefix_tuning":
        from toolkit.finetune.prefix import apply_prefix

        apply_prefix(model, args, options.prefix_tuning)
    elif options.adapter == "llama_adapter":
        from toolkit.finetune.llama_adapter import apply_llama_adapter

        apply_llama_adapter(model, adapted_layers(args, options), args, options.llama_adapter)


def added_init(name: str, shape: tuple[int, ...]) -> Init:
    """Return the initial distribution of an adapter's parameter, such that the model hardly changes at
    first."""
    if name.endswith("lora_a"):  # the same variance as PEFT's distributions
        return Init(std=1.0 if updates_embedding(name) else (3 * shape[-1]) ** -0.5)
    return {"prompt": Init(std=1.0), "keys": Init(std=0.02), "values": Init(std=0.02)}.get(
        name.rpartition(".")[2], Init()
    )


def init_from_weights(models: Iterable[Decoder]) -> None:
    """Initialize DoRA's magnitudes and rows of the embedding, which depend on loaded weights."""
    for model in models:
        for module in model.modules():
            if reset := getattr(module, "reset_from_weight", None):
                reset()
