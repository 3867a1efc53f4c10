"""Llama 2, 3, 3.1, 3.2 and 3.3 in plain modules, with Meta's parameter names and RoPE layout.

Shapes: B batch, S sequence, T = B·S tokens, D model dim, H heads, K key/value heads, E head dim,
P = E/2 rotated pairs, F feed-forward, V vocabulary. Hidden states have the parameters' dtype, and
norms, rotations and the loss compute in at least fp32 (fp64 stays fp64).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.loss import chunked_loss, cross_entropy_sum
from toolkit.models.llama.args import LlamaArgs, RopeScaling
from toolkit.models.llama.attention import AttentionBackend, AttentionMask, attention_backend


class Llama(nn.Module):
    """Tokens in; logits, or with labels their summed loss, out.

    A pipeline stage sets ``tok_embeddings``, or ``norm`` and ``output``, to None and drops blocks: then
    hidden states come in or go out. A tied head has no weight of its own and is given the embedding's,
    so that the pair cannot come apart when parameters are moved or replaced.
    """

    def __init__(self, args: LlamaArgs, *, attention: str = "sdpa", loss_chunk_tokens: int = 2048):
        super().__init__()
        self.args = args
        self.attention = attention_backend(attention)
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # Keyed by index, so that names stay when a pipeline takes blocks away.
        self.layers = nn.ModuleDict(
            {str(index): TransformerBlock(args, self.attention) for index in range(args.n_layers)}
        )
        self.norm: nn.RMSNorm | None = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output: OutputHead | None = OutputHead(args, loss_chunk_tokens)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, S, V), or with ``labels`` the summed loss: a scalar of at least fp32.

        ``tokens`` (B, S) int64, or hidden states (B, S, D) where there is no embedding. ``positions``
        (B, S) of the tokens, 0 … S−1 if None. ``documents`` (B, S): attention stays within runs of equal
        ids and is causal; None is one document a row. ``labels`` (B, S) int64, already shifted, −100 to
        leave a token out; unused where there is no head, which returns hidden states (B, S, D).
        """
        h_BSD = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=h_BSD.device)
        if self.layers:  # a stage of embedding or head alone has none, and needs no large mask
            rotations = rope_rotations(self.args, positions, h_BSD.dtype)
            mask = self.attention.mask(documents, len(h_BSD), positions.shape[-1], h_BSD.device)
            for block in self.layers.values():
                h_BSD = block(h_BSD, rotations, mask)
        if self.norm is None or self.output is None:
            return h_BSD
        tied_VD = None
        if self.args.tie_embeddings and self.tok_embeddings is not None:
            tied_VD = self.tok_embeddings.weight
        return self.output(self.norm(h_BSD), labels, tied_VD)


class TransformerBlock(nn.Module):
    """One transformer layer; residual additions around attention and feed-forward."""

    def __init__(self, args: LlamaArgs, attention: AttentionBackend):
        super().__init__()
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args, attention)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.ffn_dim)

    def forward(self, h_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        h_BSD = h_BSD + self.attention(self.attention_norm(h_BSD), rotations, mask)
        return h_BSD + self.feed_forward(self.ffn_norm(h_BSD))


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, args: LlamaArgs, backend: AttentionBackend):
        super().__init__()
        self.backend = backend
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        # Heads are counted from the projection: under tensor parallelism a rank has its part of them.
        q_BSHE = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        out_BSHE = self.backend(rotate(q_BSHE, rotations), rotate(k_BSKE, rotations), v_BSKE, mask)
        return self.wo(out_BSHE.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) · w3 x) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class OutputHead(nn.Module):
    """Hidden states to logits, or straight to the summed loss, so that a sharded head is gathered once."""

    def __init__(self, args: LlamaArgs, loss_chunk_tokens: int):
        super().__init__()
        self.weight = None if args.tie_embeddings else nn.Parameter(torch.empty(args.vocab_size, args.dim))
        self.loss_chunk_tokens = loss_chunk_tokens
        self.loss = _head_loss  # replaced by its compiled form under torch.compile

    def forward(self, h_BSD: Tensor, labels: Tensor | None = None, tied_VD: Tensor | None = None) -> Tensor:
        """Logits (B, S, V), or the summed loss of ``labels`` (B, S). ``tied_VD`` is a tied embedding."""
        weight_VD = self.weight if tied_VD is None else tied_VD
        assert weight_VD is not None, "a tied head needs the embedding"
        if labels is None:
            return F.linear(h_BSD, weight_VD)
        return chunked_loss(
            self.loss, h_BSD.flatten(0, 1), weight_VD, labels.flatten(), chunk_tokens=self.loss_chunk_tokens
        )


def _head_loss(h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    return cross_entropy_sum(F.linear(h_TD, weight_VD), labels_T)


def rope_frequencies(args: LlamaArgs, device: torch.device | None = None) -> Tensor:
    """Radians a position for each pair: (P,) fp64. Slow ones are divided by Llama 3.1's factor."""
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.float64, device=device) / args.head_dim
    frequencies = args.rope_theta**-exponents
    return frequencies if args.rope_scaling is None else _scale(frequencies, args.rope_scaling)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths that turn often within the original context stay, those that do not get ``factor``
    times longer, and between the two bounds the change is gradual."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_rotations(args: LlamaArgs, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """cos and sin of position·frequency for ``positions`` (S,) or (B, S): (… S, 1, P, 2) for :func:`rotate`.

    fp32, or fp64 where ``dtype`` is. Angles are taken in fp64: at position 131,071 fp32 would be 0.008
    radians off. Computed anew in each forward, which costs less than one norm: no buffer to lose on the
    meta device or to be cast with the model, and no limit on positions.
    """
    angles = positions.to(torch.float64)[..., None] * rope_frequencies(args, positions.device)
    precision = torch.promote_types(dtype, torch.float32)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).to(precision)[..., None, :, :]


def rotate(x_BSHE: Tensor, rotations: Tensor) -> Tensor:
    """Turn neighbouring pairs (Meta's layout) by the rotations; the dtype stays.

    As complex numbers this is faster in eager mode on CPU than with separate cosines and sines; inductor
    generates no code for complex numbers.
    """
    x_BSHP2 = x_BSHE.to(rotations.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        (even, odd), (cos, sin) = x_BSHP2.unbind(-1), rotations.unbind(-1)
        turned_BSHP2 = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        turned_BSHP2 = torch.view_as_real(torch.view_as_complex(x_BSHP2) * torch.view_as_complex(rotations))
    return turned_BSHP2.flatten(-2).to(x_BSHE.dtype)


@dataclass(frozen=True)
class Init:
    """A normal distribution, redrawn beyond ``cut`` standard deviations; ``std`` 0 is a constant."""

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


def init_rule(name: str, args: LlamaArgs) -> Init:
    """How the parameter ``name`` starts: as torchtitan's Llama 3, save for a tied embedding.

    Projections into the residual stream shrink with depth. The head gives logits of variance about
    one, so that training starts near ln(V). A tied embedding cannot have torchtitan's variance of one,
    under which each token would predict itself with logit √D·√D; 0.02 is what tied models use.
    """
    if name.endswith("norm.weight"):
        return Init(mean=1.0)
    if name == "tok_embeddings.weight":
        return Init(std=0.02 if args.tie_embeddings else 1.0)
    if name == "output.weight":
        return Init(std=args.dim**-0.5, cut=3.0)
    _, layer, _, projection, _ = name.split(".")
    if projection in ("wo", "w2", "w3"):
        return Init(std=0.02 / math.sqrt(2 * (int(layer) + 1)))
    return Init(std=0.02)
