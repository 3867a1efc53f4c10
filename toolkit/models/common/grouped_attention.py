"""Grouped-query attention. Shapes are those of :mod:`toolkit.models.common.decoder`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention import AttentionBackend, AttentionMask
from toolkit.models.common.rms_norm import RMSNorm
from toolkit.models.common.rope import rotate


class Sinks(nn.Module):
    """One logit per head (H,) in the denominator of its softmax (arXiv:2309.17453)."""

    def __init__(self, heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self) -> Tensor:
        return self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary position embeddings, if block ``layer`` has them.

    Raises:
        ValueError: the model has sinks, which the backend does not support.
    """

    def __init__(self, args: ModelArgs, backend: AttentionBackend, layer: int = 0):
        super().__init__()
        self.backend = backend
        self.rope = args.has_rope(layer)
        self.norm_eps = args.norm_eps if args.irope and args.irope.qk_norm else None
        self.head_dim = args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=args.out_bias)
        self.q_norm = RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.sinks = Sinks(args.n_heads) if args.sinks else None
        if args.sinks and not backend.takes_sinks:
            raise ValueError(f"{type(backend).__name__} attention does not support sinks")
        # Replaces the call of the backend; it is called with this module and the backend's arguments, and
        # calls the backend itself.
        self.adapter: nn.Module | None = None

    def forward(self, x_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        # The number of heads is inferred, because under tensor parallelism each rank has only some of them.
        q_BSHE = self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSKE = self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHE, k_BSKE = self.q_norm(q_BSHE), self.k_norm(k_BSKE)
        return self.attend(*self.place(q_BSHE, k_BSKE, rotations), v_BSKE, mask)

    def place(self, q_BSHE: Tensor, k_BSKE: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated queries and keys, normalized if ``norm_eps`` is set; without RoPE, ``rotations`` are
        factors of the queries (:func:`~toolkit.models.common.rope.query_scales`)."""
        if not self.rope:
            return (q_BSHE * rotations).to(q_BSHE.dtype), k_BSKE
        q_BSHE, k_BSKE = rotate(q_BSHE, rotations), rotate(k_BSKE, rotations)
        if self.norm_eps is None:
            return q_BSHE, k_BSKE
        shape = (self.head_dim,)
        return F.rms_norm(q_BSHE, shape, eps=self.norm_eps), F.rms_norm(k_BSKE, shape, eps=self.norm_eps)

    def attend(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask: AttentionMask) -> Tensor:
        """Attend with rotated queries and keys, through the adapter if any. Returns (B, S, D)."""
        heads = q_BSHE, k_BSKE, v_BSKE, mask
        if self.sinks is not None:
            assert self.adapter is None, "adapters of keys and values have no sinks"
            backend: Any = self.backend
            out_BSHE = backend(*heads, sinks_H=self.sinks())
        else:
            out_BSHE = self.backend(*heads) if self.adapter is None else self.adapter(self, *heads)
        return self.wo(out_BSHE.flatten(-2))
