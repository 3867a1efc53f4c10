"""Names and shapes of the parameters of a model. Imports no torch."""

from __future__ import annotations

from toolkit.models.common.args import ModelArgs, head_shapes


def parameter_names(args: ModelArgs) -> list[str]:
    """Names of the distinct parameters in the model's order; a tied head has none."""
    return list(parameter_shapes(args))


def parameter_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Shapes of the distinct parameters by name, in the model's order."""
    dim, queries, keys = args.dim, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attention_norm": (dim,),
        "attention.wq": (queries, dim),
        "attention.wk": (keys, dim),
        "attention.wv": (keys, dim),
        "attention.wo": (dim, queries),
        **(
            {"attention.q_norm": (args.head_dim,), "attention.k_norm": (args.head_dim,)}
            if args.qk_norm
            else {}
        ),
        "ffn_norm": (dim,),
        "feed_forward.w1": (args.ffn_dim, dim),
        "feed_forward.w2": (dim, args.ffn_dim),
        "feed_forward.w3": (args.ffn_dim, dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings": (args.vocab_size, dim)}
    for layer in range(args.n_layers):
        shapes |= {f"layers.{layer}.{part}": shape for part, shape in block.items()}
    shapes["norm"] = (dim,)
    if not args.tie_embeddings:
        shapes |= head_shapes(args)
    return {f"{module}.weight": shape for module, shape in shapes.items()}
