"""How a decoder may be cut over devices, as data: the units that FSDP gathers and frees together, and what
tensor parallelism does to each module."""

from __future__ import annotations

from torch import nn

from toolkit.models.common.decoder import Decoder


def tensor_plan(*, loss_parallel: bool = True) -> dict[str, str]:
    """Styles of :mod:`toolkit.parallel.tensor_parallel` by patterns of modules' names."""
    return {
        "tok_embeddings": "embedding",
        "layers.*.attention_norm": "norm",
        "layers.*.attention": "gather",
        "layers.*.attention.w[qkv]": "column",
        "layers.*.attention.wo": "row",
        "layers.*.attention.[qk]_norm": "norm",
        "layers.*.ffn_norm": "norm",
        "layers.*.feed_forward": "gather",
        "layers.*.feed_forward.w[13]": "column",
        "layers.*.feed_forward.w2": "row",
        "norm": "norm",
        "output": "head" if loss_parallel else "gathered head",
    }


def root_modules(model: Decoder) -> set[nn.Module]:
    """Modules that no unit may hold: a tied embedding is needed at both ends of the forward."""
    embedding = model.tok_embeddings
    return {embedding} if embedding is not None and model.args.tie_embeddings else set()


def fsdp_units(model: Decoder) -> list[list[nn.Module]]:
    """Groups of modules, each one FSDP unit, in forward order; what is in none belongs to the root.

    The embedding; each block; the last norm with the head. A tied embedding stays, with the last norm,
    in the root, which is gathered throughout.
    """
    blocks: list[list[nn.Module]] = [[block] for block in model.layers.values()]
    if root_modules(model):
        return blocks
    first: list[list[nn.Module]] = [[model.tok_embeddings]] if model.tok_embeddings is not None else []
    last: list[nn.Module] = [module for module in (model.norm, model.output) if module is not None]
    return first + blocks + ([last] if last else [])
