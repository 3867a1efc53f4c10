"""Names and shapes of the parameters of a model. Imports no torch."""

from __future__ import annotations

from toolkit.models.common.args import ModelArgs, head_shapes

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"


def parameter_names(args: ModelArgs) -> list[str]:
    """Names of the distinct parameters in the model's order; a tied head has none."""
    return list(parameter_shapes(args))


def linear_layers(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Shapes (N, K) of the weights of the blocks' linear layers, by the layers' names."""
    weights = {name.removesuffix(".weight"): shape for name, shape in parameter_shapes(args).items()}
    return {name: shape for name, shape in weights.items() if name.startswith("layers.") and len(shape) == 2}


def parameter_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Shapes of the distinct parameters by name, in the model's order."""
    dim, queries, keys = args.dim, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    block: dict[str, tuple[int, ...]] = {"attention_norm.weight": (dim,)}
    for part, rows in {"wq": queries, "wk": keys, "wv": keys}.items():
        block[f"attention.{part}.weight"] = (rows, dim)
        if args.qkv_bias:
            block[f"attention.{part}.bias"] = (rows,)
    block["attention.wo.weight"] = (dim, queries)
    if args.qk_norm:
        block |= {f"attention.{part}.weight": (args.head_dim,) for part in ("q_norm", "k_norm")}
    block |= {
        "ffn_norm.weight": (dim,),
        "feed_forward.w1.weight": (args.ffn_dim, dim),
        "feed_forward.w2.weight": (dim, args.ffn_dim),
        "feed_forward.w3.weight": (args.ffn_dim, dim),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (args.vocab_size, dim)}
    for layer in range(args.n_layers):
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in block.items()}
    shapes["norm.weight"] = (dim,)
    if not args.tie_embeddings:
        shapes |= {f"{module}.weight": shape for module, shape in head_shapes(args).items()}
    return shapes
