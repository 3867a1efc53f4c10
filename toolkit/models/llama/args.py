"""Shapes of the published Llama models by ``model.name`` and ``model.flavor``. Imports no torch.

``llama3`` is what torchtitan means by it: RoPE scaled by 8 at every size. The other names are
Meta's releases. Each has a ``debugmodel``, a few million parameters that train on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from toolkit.errors import ConfigError, Problem, did_you_mean, nearest_multiple


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the slow RoPE frequencies to a context ``factor`` times longer."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class LlamaArgs:
    """Everything that fixes the architecture. ``head_dim`` usually is ``dim / n_heads``."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 4096
    tie_embeddings: bool = False


INNER_CLASSES = ("Attention", "FeedForward", "Linear", "RMSNorm")
"""Classes of the modules inside a block."""
WRAP_CLASSES = ("TransformerBlock", "Embedding", "OutputHead", *INNER_CLASSES)
"""Classes of the modules of a Llama: what FSDP may take as its units."""


def takes_vocabulary(flavor: str) -> bool:
    """Say if the tokenizer sets the size of the vocabulary where ``vocab_size`` does not: of a debugmodel."""
    return flavor.startswith("debugmodel")


def meta_ffn_dim(dim: int, multiplier: float, multiple_of: int) -> int:
    """Meta's rule: two thirds of 4·dim, times the multiplier, rounded up to the multiple."""
    return -(-int(multiplier * int(8 * dim / 3)) // multiple_of) * multiple_of


@dataclass(frozen=True)
class _Size:
    """A row of Meta's ``params.json``: the feed-forward width follows from the last two."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_multiplier: float = 1.0
    ffn_multiple_of: int = 256

    def ffn_dim(self, dim: int) -> int:
        return meta_ffn_dim(dim, self.ffn_multiplier, self.ffn_multiple_of)


@dataclass(frozen=True)
class _Family:
    sizes: dict[str, _Size]
    vocab_size: int = 128256
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    max_seq_len: int = 131072
    debug_max_seq_len: int = 2048
    tie_embeddings: bool = False

    def args(self, flavor: str) -> LlamaArgs:
        size = self.sizes[flavor]
        debug = takes_vocabulary(flavor)
        return LlamaArgs(
            dim=size.dim,
            n_layers=size.n_layers,
            n_heads=size.n_heads,
            n_kv_heads=size.n_kv_heads,
            ffn_dim=size.ffn_dim(size.dim),
            vocab_size=_DEBUG_VOCAB if debug else self.vocab_size,
            head_dim=size.dim // size.n_heads,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            max_seq_len=self.debug_max_seq_len if debug else self.max_seq_len,
            tie_embeddings=self.tie_embeddings,
        )


# The vocabulary of a debugmodel is the tokenizer's; torchtitan's stands in where there is none.
_DEBUG_VOCAB = 2048
_DEBUG = _Size(256, 6, 16, 16)
_8B = _Size(4096, 32, 32, 8, 1.3, 1024)
_70B = _Size(8192, 80, 64, 8, 1.3, 4096)
_405B = _Size(16384, 126, 128, 8, 1.2, 4096)

_FAMILIES = {
    "llama2": _Family(
        {
            "debugmodel": _DEBUG,
            "7B": _Size(4096, 32, 32, 32),
            "13B": _Size(5120, 40, 40, 40),
            "70B": _70B,
        },
        vocab_size=32000,
        rope_theta=10000.0,
        max_seq_len=4096,
    ),
    "llama3": _Family(
        {
            # torchtitan names its attention back ends in the flavor; the shape is the same.
            "debugmodel": _DEBUG,
            "debugmodel_flex_attn": _DEBUG,
            "debugmodel_varlen_attn": _DEBUG,
            "8B": _8B,
            "8B_flex": _8B,
            "8B_varlen": _8B,
            "70B": _70B,
            "405B": _405B,
        },
        rope_scaling=RopeScaling(8.0),
        debug_max_seq_len=131072,
    ),
    "llama3.0": _Family({"debugmodel": _DEBUG, "8B": _8B, "70B": _70B}, max_seq_len=8192),
    "llama3.1": _Family(
        {"debugmodel": _DEBUG, "8B": _8B, "70B": _70B, "405B": _405B}, rope_scaling=RopeScaling(8.0)
    ),
    "llama3.2": _Family(
        {
            "debugmodel": _DEBUG,
            "1B": _Size(2048, 16, 32, 8, 1.5, 256),
            "3B": _Size(3072, 28, 24, 8, 1.0, 256),
        },
        rope_scaling=RopeScaling(32.0),
        tie_embeddings=True,
    ),
    "llama3.3": _Family({"debugmodel": _DEBUG, "70B": _70B}, rope_scaling=RopeScaling(8.0)),
}

PRESETS: dict[str, dict[str, LlamaArgs]] = {
    name: {flavor: family.args(flavor) for flavor in family.sizes} for name, family in _FAMILIES.items()
}

_OVERRIDES = {field.name for field in fields(LlamaArgs)} - {"rope_scaling"} | {"rope_scaling_factor"}


def resolve(name: str, flavor: str, *, tokenizer_vocab: int | None = None, **overrides: Any) -> LlamaArgs:
    """The shape of ``name``/``flavor`` with fields replaced as by :func:`changed`.

    ``ffn_dim`` follows ``dim`` by the preset's own rule. A debugmodel without ``vocab_size`` has
    ``tokenizer_vocab`` entries.

    Raises:
        ConfigError: no such name or flavor, or values that do not fit together; all of them at once.
    """
    preset = _find(name, flavor)
    if takes_vocabulary(flavor) and tokenizer_vocab is not None and overrides.get("vocab_size") is None:
        overrides["vocab_size"] = tokenizer_vocab
    return changed(preset, ffn_rule=_FAMILIES[name].sizes[flavor].ffn_dim, **overrides)


def changed(base: LlamaArgs, *, ffn_rule: Callable[[int], int] | None = None, **overrides: Any) -> LlamaArgs:
    """``base`` with fields replaced; ``None`` keeps the value that it has.

    ``overrides`` are the ``model.*`` keys: every field of :class:`LlamaArgs`, and
    ``rope_scaling_factor`` for ``rope_scaling`` (1 turns scaling off; where the base has none, its
    ``max_seq_len`` is taken as the original context). What depends on an overridden field follows it
    unless it is given too: ``head_dim`` is ``dim / n_heads``, ``ffn_dim`` comes from ``dim`` by
    ``ffn_rule`` where there is one, and ``n_kv_heads`` follows ``n_heads`` where they were equal.

    Raises:
        ConfigError: values that do not fit together; all of them at once.
    """
    unknown = overrides.keys() - _OVERRIDES
    if unknown:
        raise TypeError(f"not fields of the model: {', '.join(sorted(unknown))}")
    given = {key: value for key, value in overrides.items() if value is not None}

    if "rope_scaling_factor" in given:
        given["rope_scaling"] = _scaling(base, given.pop("rope_scaling_factor"))
    if "dim" in given and ffn_rule is not None:
        given.setdefault("ffn_dim", ffn_rule(given["dim"]))
    if "n_heads" in given and base.n_kv_heads == base.n_heads:
        given.setdefault("n_kv_heads", given["n_heads"])
    derived = "head_dim" not in given and not given.keys().isdisjoint(("dim", "n_heads"))
    if derived:
        given["head_dim"] = given.get("dim", base.dim) // given.get("n_heads", base.n_heads)
    args = replace(base, **given)
    _check_together(args, derived_head_dim=derived)
    return args


_NAMED_BY_FLAVOR = {"_flex_attn": "flex", "_flex": "flex", "_varlen_attn": "varlen", "_varlen": "varlen"}


def flavor_attention(flavor: str) -> str | None:
    """The attention back end that torchtitan's spelling of a flavor names, as 8B_flex does."""
    return next((name for end, name in _NAMED_BY_FLAVOR.items() if flavor.endswith(end)), None)


def attention_choice(asked: str, flavor: str, *, device: str, documents: bool) -> str:
    """The attention back end for ``model.attention`` on a ``device`` ("cpu" or "cuda").

    ``documents`` is whether samples hold several documents, each attending within itself. "auto" is
    SDPA on CPU, where the others cannot train. On CUDA it is what the flavor names, else SDPA for plain
    causal attention, for which it has fused kernels, and flex within documents, for which SDPA needs a
    dense mask (S² bytes a sample, and a slower kernel). That is others' published experience, not
    measured here; ``benchmarks/attention.py`` measures it on the device at hand.
    """
    if asked != "auto":
        return asked
    if device == "cpu":
        return "sdpa"
    return flavor_attention(flavor) or ("flex" if documents else "sdpa")


def parameter_count(args: LlamaArgs) -> int:
    """Number of distinct parameters; a tied head counts once."""
    embeddings = args.vocab_size * args.dim * (1 if args.tie_embeddings else 2)
    return embeddings + args.n_layers * sum(block_parameters(args)) + args.dim


def block_parameters(args: LlamaArgs) -> tuple[int, int, int]:
    """Parameters of one block's attention, feed-forward and norms."""
    attention = 2 * args.dim * args.head_dim * (args.n_heads + args.n_kv_heads)
    return attention, 3 * args.dim * args.ffn_dim, 2 * args.dim


def parameter_names(args: LlamaArgs) -> list[str]:
    """Names of the distinct parameters in the model's order; a tied head has none."""
    return list(parameter_shapes(args))


def parameter_shapes(args: LlamaArgs) -> dict[str, tuple[int, ...]]:
    """Shapes of the distinct parameters by name, in the model's order."""
    dim, queries, keys = args.dim, args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    block: dict[str, tuple[int, ...]] = {
        "attention_norm": (dim,),
        "attention.wq": (queries, dim),
        "attention.wk": (keys, dim),
        "attention.wv": (keys, dim),
        "attention.wo": (dim, queries),
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
        shapes["output"] = (args.vocab_size, dim)
    return {f"{module}.weight": shape for module, shape in shapes.items()}


def _find(name: str, flavor: str) -> LlamaArgs:
    if name not in PRESETS:
        fix = did_you_mean(name, PRESETS, "set model.name to one of them")
        raise ConfigError(Problem(f"the models are {', '.join(PRESETS)}", fix, "model.name", name))
    if flavor not in PRESETS[name]:
        elsewhere = [other for other, flavors in PRESETS.items() if flavor in flavors]
        fix = did_you_mean(flavor, PRESETS[name], "set model.flavor to one of them")
        size, named = flavor.partition("_")[0], flavor_attention(flavor)
        if named and size in PRESETS[name]:
            fix = f'set model.flavor = "{size}" and model.attention = "{named}"'
        if elsewhere:
            fix = f"{flavor} is a flavor of {', '.join(elsewhere)}: set model.name to one of them, or {fix}"
        rule = f"the flavors of {name} are {', '.join(PRESETS[name])}"
        raise ConfigError(Problem(rule, fix, "model.flavor", flavor))
    return PRESETS[name][flavor]


def _scaling(base: LlamaArgs, factor: float) -> RopeScaling | None:
    if factor == 1:
        return None
    if base.rope_scaling is not None:
        return replace(base.rope_scaling, factor=float(factor))
    return RopeScaling(float(factor), original_max_seq_len=base.max_seq_len)


def _check_together(args: LlamaArgs, *, derived_head_dim: bool) -> None:
    problems = []
    if derived_head_dim and args.dim % args.n_heads:
        rule = f"dim must be a multiple of n_heads ({args.n_heads}) where head_dim is not set"
        fix = f"model.dim = {nearest_multiple(args.dim, args.n_heads)}, or set model.head_dim"
        problems.append(Problem(rule, fix, "model.dim", args.dim))
    elif args.head_dim % 2:
        rule = "head_dim (dim / n_heads where it is not set) must be even: RoPE turns pairs"
        fix = f"model.head_dim = {args.head_dim + 1}, or change model.dim or model.n_heads"
        problems.append(Problem(rule, fix, "model.head_dim", args.head_dim))
    if args.n_heads % args.n_kv_heads:
        divisors = [k for k in range(1, args.n_heads + 1) if args.n_heads % k == 0]
        nearest = min(divisors, key=lambda k: abs(k - args.n_kv_heads))
        rule = f"n_heads ({args.n_heads}) must be a multiple of n_kv_heads"
        fix = f"model.n_kv_heads = {nearest} (possible: {', '.join(map(str, divisors))})"
        problems.append(Problem(rule, fix, "model.n_kv_heads", args.n_kv_heads))
    if problems:
        raise ConfigError(problems)
