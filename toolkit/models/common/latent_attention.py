"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Names are torchtitan's.

Shapes: B batch, S sequence, D model dim, H heads, E = N + R head dim of queries and keys, of which N elements
have no position and R are rotated, V head dim of values, L latent vector, C = L + R.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.models.common.args import ModelArgs, YarnScaling, yarn_factor
from toolkit.models.common.attention import AttentionBackend, AttentionMask
from toolkit.models.common.grouped_attention import Attention
from toolkit.models.common.rms_norm import RMSNorm
from toolkit.models.common.rope import rotate

_NORM_EPS = 1e-6
"""Epsilon of the latent vectors' norms, which is the same whatever rms_norm_eps of the model is."""


class LatentAttention(Attention):
    """Attention whose keys and values are projected from one latent vector per token.

    Backends expect heads of one size, so values are padded to E elements, and outputs cut back to V. Backends
    with a cache take the latent vectors themselves.
    """

    def __init__(self, args: ModelArgs, backend: AttentionBackend):
        nn.Module.__init__(self)
        assert args.mla is not None
        mla = args.mla
        self.backend, self.head_dim, self.mla = backend, args.head_dim, mla
        self.scale = _score_scale(args)
        self.wq_a: nn.Linear | None = None
        self.q_norm: RMSNorm | None = None
        self.wq_b: nn.Linear | None = None
        if mla.q_lora_rank:
            self.wq_a = nn.Linear(args.dim, mla.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(mla.q_lora_rank, eps=_NORM_EPS)
            self.wq_b = nn.Linear(mla.q_lora_rank, args.n_heads * args.head_dim, bias=False)
        else:
            self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wkv_a = nn.Linear(args.dim, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, eps=_NORM_EPS)
        made = args.n_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.wkv_b = nn.Linear(mla.kv_lora_rank, made, bias=False)
        self.wo = nn.Linear(args.n_heads * mla.v_head_dim, args.dim, bias=False)
        self.adapter: nn.Module | None = None

    def forward(self, x_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor:
        mla = self.mla
        q_BSHE = self._queries(x_BSD).unflatten(-1, (-1, self.head_dim))
        q_BSHN, q_BSHR = q_BSHE.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        q_BSHR = rotate(q_BSHR.contiguous(), rotations)
        latent_BSL, k_BSR = self.wkv_a(x_BSD).split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        latent_BSL, k_BS1R = self.kv_norm(latent_BSL), rotate(k_BSR.unsqueeze(2).contiguous(), rotations)
        if self.backend.takes_latents:
            return self._attend_latents(q_BSHN, q_BSHR, latent_BSL, k_BS1R, mask)
        k_BSHN, v_BSHV = self._heads(latent_BSL)
        q_BSHE = torch.cat([q_BSHN, q_BSHR], dim=-1) * self.scale
        k_BSHE = torch.cat([k_BSHN, k_BS1R.expand(-1, -1, k_BSHN.shape[2], -1)], dim=-1)
        v_BSHE = F.pad(v_BSHV, (0, self.head_dim - mla.v_head_dim))
        return self.attend(q_BSHE, k_BSHE, v_BSHE, mask)

    def _attend_latents(
        self, q_BSHN: Tensor, q_BSHR: Tensor, latent_BSL: Tensor, k_BS1R: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attend to latent vectors, which all heads share: the projections to keys and values are applied to
        queries and results instead (section 2.1.2 of the paper). Returns (B, S, D)."""
        backend: Any = self.backend
        if backend.up is None:  # by its forward, because an adapter or a shard may be in it
            backend.up = self._heads(torch.eye(latent_BSL.shape[-1]).to(latent_BSL)[None])
        up_LHN, up_LHV = (it.squeeze(0) for it in backend.up)
        q_BSHC = torch.cat([torch.einsum("bshn,lhn->bshl", q_BSHN, up_LHN), q_BSHR], dim=-1)
        k_BS1C = torch.cat([latent_BSL.unsqueeze(2), k_BS1R], dim=-1)
        scale = self.scale * (k_BS1C.shape[-1] / self.head_dim) ** 0.5  # the backend divides by √C
        out_BSHC = backend(q_BSHC * scale, k_BS1C, k_BS1C, mask)
        out_BSHL = out_BSHC[..., : self.mla.kv_lora_rank]
        return self.wo(torch.einsum("bshl,lhv->bshv", out_BSHL, up_LHV).flatten(-2))

    def _heads(self, latent_BSL: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys without position (B, S, H, N) and values (B, S, H, V)."""
        sizes = [self.mla.qk_nope_head_dim, self.mla.v_head_dim]
        keys, values = self.wkv_b(latent_BSL).unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
        return keys, values

    def attend(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, mask: AttentionMask) -> Tensor:
        heads = q_BSHE, k_BSHE, v_BSHE, mask
        out_BSHE = self.backend(*heads) if self.adapter is None else self.adapter(self, *heads)
        return self.wo(out_BSHE[..., : self.mla.v_head_dim].flatten(-2))

    def _queries(self, x_BSD: Tensor) -> Tensor:
        if self.wq_a is None or self.q_norm is None or self.wq_b is None:
            return self.wq(x_BSD)
        return self.wq_b(self.q_norm(self.wq_a(x_BSD)))


def _score_scale(args: ModelArgs) -> float:
    """Return the factor by which scores are multiplied in addition to 1 / √E."""
    yarn = args.rope_scaling
    if not isinstance(yarn, YarnScaling) or not yarn.mscale_all_dim:
        return 1.0
    return yarn_factor(yarn.factor, yarn.mscale_all_dim) ** 2
