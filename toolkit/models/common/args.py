"""Model args: the hyperparameters of an architecture, and overrides of them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from toolkit.errors import ConfigError, Problem, divisors, join_or, nearest_multiple
from toolkit.io.json_fields import is_count, is_positive, is_size


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of low RoPE frequencies for a context ``factor`` times longer."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class LinearScaling:
    """Division of positions by ``factor`` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071) for a context ``factor`` times the original one.

    Frequencies with at least ``beta_fast`` turns in the original context are kept, those with at most
    ``beta_slow`` are divided by ``factor``, and those in between are interpolated by index; ``truncate``
    rounds the bounds outwards. Rotations are multiplied by ``attention_factor``; None: 0.1 ln(factor) + 1.
    Latent attention multiplies its scores by the square of 0.1 ``mscale_all_dim`` ln(factor) + 1.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    mscale_all_dim: float = 0.0


Scaling = RopeScaling | LinearScaling | YarnScaling


def yarn_factor(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor for the rotations in a context ``factor`` times longer."""
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


@dataclass(frozen=True)
class Classifier:
    """A sequence classification head that replaces the LM head. The head returns one score per label, after
    fully connected layers of ``hidden_sizes``."""

    labels: tuple[str, ...]
    hidden_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class MoEArgs:
    """Mixture of experts instead of a block's feed-forward; names are torchtitan's.

    For each token, a router computes a score per expert, by a softmax over experts or a sigmoid, and sends
    the token to the ``top_k`` experts with the largest scores. The experts' outputs are summed, weighted by
    these scores, which are divided by their sum if ``route_norm`` and multiplied by ``route_scale``.

    Attributes:
        ffn_dim: feed-forward width of an expert.
        num_shared_experts: experts that every token passes; together they are one feed-forward.
        expert_bias: whether each layer has a buffer that is added to the scores when experts are chosen, and
            not when they are weighted (DeepSeek-V3, arXiv:2412.19437).
        num_expert_groups, num_limited_groups: if not 0, experts are chosen among those of the
            ``num_limited_groups`` groups with the largest scores.
        first_dense: number of leading blocks without experts.
        step: every ``step``-th block, of those after the dense ones, has experts.
        bias: whether the router and the experts' matrices have biases.
        swiglu_limit, swiglu_alpha: if the limit is not 0, an expert's activation is that of
            :func:`~toolkit.models.common.swiglu.clamped_swiglu`.
        score_before_experts: whether scores multiply the inputs of experts instead of their outputs.
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    num_shared_experts: int = 0
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    route_norm: bool = False
    route_scale: float = 1.0
    expert_bias: bool = False
    num_expert_groups: int = 0
    num_limited_groups: int = 0
    first_dense: int = 0
    step: int = 1
    bias: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.702
    score_before_experts: bool = False

    def has_experts(self, layer: int) -> bool:
        """Return whether block ``layer`` has experts."""
        return layer >= self.first_dense and (layer - self.first_dense + 1) % self.step == 0

    def broken_rules(self) -> dict[str, str]:
        """Return the rules that fields break, by field."""
        counts = ("num_experts", "top_k", "ffn_dim", "step")
        sizes = ("num_shared_experts", "num_expert_groups", "num_limited_groups", "first_dense")
        broken = {name: "must be a positive integer" for name in counts if not is_count(getattr(self, name))}
        broken |= {
            name: "must be a nonnegative integer" for name in sizes if not is_size(getattr(self, name))
        }
        if self.score_func not in ("softmax", "sigmoid"):
            broken["score_func"] = 'must be "softmax" or "sigmoid"'
        if not is_positive(self.route_scale):
            broken["route_scale"] = "must be a positive number"
        return broken or self._broken_sizes()

    def _broken_sizes(self) -> dict[str, str]:
        experts, groups, limited = self.num_experts, self.num_expert_groups, self.num_limited_groups
        if self.top_k > experts:
            return {"top_k": f"must be at most num_experts, which is {experts}"}
        if not groups:
            return {"num_limited_groups": "must be 0 without num_expert_groups"} if limited else {}
        # The score of a group is the sum of its two best sigmoids, or its best probability.
        least = 2 if self.score_func == "sigmoid" else 1
        fitting = [count for count in divisors(experts) if experts // count >= least]
        if groups not in fitting:
            rule = f"must divide num_experts, which is {experts}, into groups of at least {least}"
            return {"num_expert_groups": f"{rule}: {join_or([0, *fitting])}"}
        needed = -(-self.top_k * groups // experts)
        if not needed <= limited <= groups:
            return {"num_limited_groups": f"must be {needed} to {groups}, for top_k = {self.top_k}"}
        return {}


@dataclass(frozen=True)
class MLAArgs:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Keys and values are projected from a latent vector of ``kv_lora_rank`` elements, and queries from one of
    ``q_lora_rank`` elements, or from the hidden states if that is 0. A head of queries or keys has
    ``qk_nope_head_dim`` elements without and ``qk_rope_head_dim`` with rotary embeddings; all heads of keys
    share the latter.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def head_dim(self) -> int:
        """Number of elements of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class IRoPEArgs:
    """Interleaved RoPE, as in Llama 4.

    Blocks with a window have RoPE and attend within chunks of that many tokens, counted from the beginning of
    each document. Blocks with full attention have no RoPE, and multiply the query at a position by
    1 + ``temperature`` · ln(1 + ⌊(position + 1) / ``temperature_floor``⌋) (arXiv:2501.19399).

    Attributes:
        qk_norm: whether each head of queries and keys is normalized after RoPE, without weights.
    """

    qk_norm: bool = True
    temperature: float = 0.1
    temperature_floor: int = 8192


@dataclass(frozen=True)
class ModelArgs:
    """Hyperparameters of an architecture.

    ``head_dim`` is usually ``dim / n_heads``. With ``qk_norm``, each head of queries and keys is normalized
    before RoPE. With ``qkv_bias``, the query, key and value projections have biases, and with ``out_bias``
    the output projection. With ``sinks``, each head has a learned logit in the denominator of its softmax
    (arXiv:2309.17453). With a ``sliding_window``, a token attends to itself and the ``sliding_window`` - 1
    tokens before it, except in every ``full_attention_step``-th block; with ``irope``, windows are chunks.
    ``family`` is the name of the :class:`~toolkit.models.common.spec.ModelSpec`. A model with a
    ``classifier`` has no LM head and no tied weights.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Scaling | None = None
    max_seq_len: int = 4096
    tie_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    sliding_window: int | None = None
    full_attention_step: int = 0
    family: str = "llama"
    classifier: Classifier | None = None
    moe: MoEArgs | None = None
    mla: MLAArgs | None = None
    irope: IRoPEArgs | None = None

    def window(self, layer: int) -> int | None:
        """Return the sliding window, or chunk, of block ``layer``, or None."""
        full = self.full_attention_step and (layer + 1) % self.full_attention_step == 0
        return None if full else self.sliding_window

    def has_rope(self, layer: int) -> bool:
        """Return whether block ``layer`` has RoPE."""
        return self.irope is None or self.window(layer) is not None

    @property
    def rope_dim(self) -> int:
        """Number of elements of a head that RoPE rotates."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_head_dim(self) -> int:
        """Number of elements of a head of values."""
        return self.mla.v_head_dim if self.mla else self.head_dim


def vocab_from_tokenizer(flavor: str) -> bool:
    """Return whether the vocabulary size defaults to the tokenizer's (debug models)."""
    return flavor.startswith("debugmodel")


INNER_CLASSES = ("Attention", "FeedForward", "Linear", "RMSNorm")
"""Module classes inside a block."""
WRAP_CLASSES = ("TransformerBlock", "Embedding", "OutputHead", *INNER_CLASSES)
"""Module classes of a decoder that can be FSDP units."""
_FIXED = {
    "rope_scaling", "qk_norm", "qkv_bias", "out_bias", "sinks", "sliding_window", "full_attention_step",
    "family", "classifier", "moe", "mla", "irope",
}  # fmt: skip
_OVERRIDES = {field.name for field in fields(ModelArgs)} - _FIXED | {"rope_scaling_factor"}


def override_args(
    base: ModelArgs, *, ffn_rule: Callable[[int], int] | None = None, **overrides: Any
) -> ModelArgs:
    """Return ``base`` with fields replaced; ``None`` keeps a field.

    ``overrides`` are the ``model.*`` keys: the fields of :class:`ModelArgs`, and ``rope_scaling_factor`` for
    ``rope_scaling``. A factor of 1 turns scaling off; if the base has no scaling, its ``max_seq_len`` is the
    original context. Dependent fields are adjusted unless they are overridden too. Thus ``head_dim`` stays
    ``dim / n_heads`` if it was, ``ffn_dim`` is computed from ``dim`` by ``ffn_rule`` if there is one, and
    ``n_kv_heads`` follows ``n_heads`` if they were equal.

    Raises:
            ConfigError: values are inconsistent; all problems are reported at once.
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
    follows = base.head_dim * base.n_heads == base.dim
    derived = follows and "head_dim" not in given and not given.keys().isdisjoint(("dim", "n_heads"))
    if derived:
        given["head_dim"] = given.get("dim", base.dim) // given.get("n_heads", base.n_heads)
    args = replace(base, **given)
    _check_together(args, overrides, derived_head_dim=derived)
    return args


def _scaling(base: ModelArgs, factor: float) -> Scaling | None:
    if factor == 1:
        return None
    if base.rope_scaling is not None:
        return replace(base.rope_scaling, factor=float(factor))
    return RopeScaling(float(factor), original_max_seq_len=base.max_seq_len)


def _check_together(args: ModelArgs, asked: Mapping[str, Any], *, derived_head_dim: bool) -> None:
    """Check that dependent sizes are consistent; report the first field in ``asked``."""
    # The number of heads must fit the model's other sizes; the number of KV heads may follow it.
    kv = args.n_kv_heads if args.n_kv_heads != args.n_heads or asked.get("n_kv_heads") else 1
    heads = [n for n in divisors(args.dim) if n % kv == 0 and args.dim // n % 2 == 0]
    set_heads = f"model.n_heads = {_nearest(heads, args.n_heads)}" if heads else "change model.n_heads"
    set_dim = f"model.dim = {nearest_multiple(args.dim, 2 * args.n_heads)}"
    problems = []

    def add(rule: str, fixes: dict[str, str]) -> None:
        name = next((name for name in asked if name in fixes and asked[name] is not None), next(iter(fixes)))
        problems.append(Problem(rule, fixes[name], f"model.{name}", getattr(args, name)))

    if derived_head_dim and args.dim % args.n_heads:
        rule = f"dim ({args.dim}) must be a multiple of n_heads ({args.n_heads}) if head_dim is not set"
        other = "or set model.head_dim"
        add(rule, {"dim": f"{set_dim}, {other}", "n_heads": f"{set_heads}, {other}"})
    elif args.head_dim % 2:
        rule = "head_dim (by default dim / n_heads) must be even: RoPE rotates pairs of elements"
        fixes = {"head_dim": (fix := f"model.head_dim = {args.head_dim + 1}")}
        if derived_head_dim:
            fixes |= {"dim": f"{set_dim}, or {fix}", "n_heads": f"{set_heads}, or {fix}"}
        add(rule, fixes)
    if asked.get("ffn_dim") and args.moe and all(map(args.moe.has_experts, range(args.n_layers))):
        rule = f"every block has experts, of width {args.moe.ffn_dim}, which no key changes"
        add(rule, {"ffn_dim": "remove model.ffn_dim"})
    if args.mla and args.head_dim != args.mla.head_dim:
        fix = f"remove model.head_dim, which is {args.mla.head_dim}"
        add("latent attention fixes head_dim", {"head_dim": fix})
    if args.mla and args.n_heads != args.n_kv_heads:
        rule = f"n_kv_heads ({args.n_kv_heads}) must be n_heads ({args.n_heads}) in latent attention"
        add(
            rule,
            {"n_kv_heads": "remove model.n_kv_heads", "n_heads": f"set model.n_heads = {args.n_kv_heads}"},
        )
    elif args.n_heads % args.n_kv_heads:
        rule = f"n_heads ({args.n_heads}) must be a multiple of n_kv_heads ({args.n_kv_heads})"
        possible = divisors(args.n_heads)
        set_kv_heads = f"model.n_kv_heads = {_nearest(possible, args.n_kv_heads)}"
        among = f"(possible: {', '.join(map(str, possible))})"
        add(rule, {"n_kv_heads": f"{set_kv_heads} {among}", "n_heads": set_heads})
    if problems:
        raise ConfigError(problems)


def _nearest(sizes: Iterable[int], size: int) -> int:
    return min(sizes, key=lambda other: abs(other - size))
