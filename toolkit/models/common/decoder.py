"""Dense Llama-style decoder in plain modules, with Meta's parameter names and RoPE layout.

Shapes: B batch, S sequence, T = B·S tokens, D model dim, H heads, K key/value heads, E head dim,
P = E/2 rotated pairs, F feed-forward, V vocabulary. Hidden states have the dtype of the parameters; norms,
RoPE and the loss compute in at least fp32 (fp64 stays fp64).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention import AttentionBackend, AttentionMask, attention_backend
from toolkit.models.common.block_output import BlockOutput, BlockSums
from toolkit.models.common.classification_head import ClassificationHead
from toolkit.models.common.grouped_attention import Attention
from toolkit.models.common.latent_attention import LatentAttention
from toolkit.models.common.lm_head import OutputHead
from toolkit.models.common.moe import MoE
from toolkit.models.common.rms_norm import RMSNorm
from toolkit.models.common.rope import query_scales, rope_rotations
from toolkit.models.common.swiglu import swiglu


class Decoder(nn.Module):
    """Decoder-only transformer that returns logits, or the loss if labels are passed.

    A pipeline stage sets ``tok_embeddings``, or ``norm`` and ``output``, to None and drops blocks; its input
    or output is then hidden states. A tied head has no weight of its own: forward passes the embedding's
    weight to it, so the two cannot diverge when parameters are moved or replaced.

    Attributes:
        backends: attention backends by the windows of the blocks.
    """

    def __init__(self, args: ModelArgs, *, attention: str = "sdpa", loss_chunk_tokens: int = 2048):
        super().__init__()
        self.args = args
        windows = dict.fromkeys(map(args.window, range(args.n_layers)))
        chunked = args.irope is not None
        self.backends = {window: attention_backend(attention, window, chunked) for window in windows}
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        # Keyed by index, so that names do not change when a pipeline stage drops blocks.
        self.layers = nn.ModuleDict(
            {
                str(index): TransformerBlock(args, self.backends[args.window(index)], index)
                for index in range(args.n_layers)
            }
        )
        self.norm: RMSNorm | None = RMSNorm(args.dim, eps=args.norm_eps)
        self.output: OutputHead | None = (
            ClassificationHead(args, args.classifier)
            if args.classifier
            else OutputHead(args, loss_chunk_tokens)
        )
        self.block_sums = BlockSums()

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, S, V), or (B, S, labels) for a classifier. With ``labels``, return the loss in at
        least fp32: the sum, or (T,) losses if the head's ``reduction`` is "none". Without a head, return
        hidden states (B, S, D).

        Args:
            tokens: (B, S) int64, or hidden states (B, S, D) if there is no embedding.
            positions: (B, S); None means 0 … S−1.
            documents: (B, S) ids; attention is causal within runs of equal ids. None means one document
                per row.
            labels: (B, S) int64, already shifted; −100 ignores a token.
        """
        h_BSD = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=h_BSD.device)
        if self.layers:  # a stage with only the embedding or the head needs no mask, which is large
            rotations = rope_rotations(self.args, positions, h_BSD.dtype)
            scales = query_scales(self.args, positions, h_BSD.dtype) if self.args.irope else rotations
            masks = {
                window: self.backends[window].mask(documents, len(h_BSD), positions.shape[-1], h_BSD.device)
                for window in dict.fromkeys(self.args.window(int(name)) for name in self.layers)
            }
            for name, block in self.layers.items():
                place = rotations if self.args.has_rope(int(name)) else scales
                out = block(h_BSD, place, masks[self.args.window(int(name))])
                h_BSD = self.block_sums.hidden(out, name)
        if self.norm is None or self.output is None:
            return h_BSD
        tied_VD = None
        if self.args.tie_embeddings and self.tok_embeddings is not None:
            tied_VD = self.tok_embeddings.weight
        return self.output(self.norm(h_BSD), labels, tied_VD)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, or experts, with pre-norms and residual connections. Blocks with experts,
    and those of some families, return a :class:`BlockOutput`."""

    def __init__(self, args: ModelArgs, attention: AttentionBackend, layer: int = 0):
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = LatentAttention(args, attention) if args.mla else Attention(args, attention, layer)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.moe: MoE | None = None
        self.feed_forward: FeedForward | None = None
        if args.moe and args.moe.has_experts(layer):
            self.moe = MoE(args)
            if shared := args.moe.num_shared_experts:
                self.moe.shared_experts = FeedForward(args.dim, shared * args.moe.ffn_dim)
        else:
            self.feed_forward = FeedForward(args.dim, args.ffn_dim)

    def forward(self, h_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> Tensor | BlockOutput:
        h_BSD, x_BSD = self.attend(h_BSD, rotations, mask)
        if self.moe is not None:
            out_BSD, *sums = self.moe(x_BSD)
            return BlockOutput(h_BSD + out_BSD, *sums)  # torch 2.11 does not compile _replace
        assert self.feed_forward is not None
        return h_BSD + self.feed_forward(x_BSD)

    def attend(self, h_BSD: Tensor, rotations: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Return the hidden states after attention, and the input of the feed-forward."""
        h_BSD = h_BSD + self.attention(self.attention_norm(h_BSD), rotations, mask)
        return h_BSD, self.ffn_norm(h_BSD)


class FeedForward(nn.Module):
    """SwiGLU feed-forward: w2(silu(w1 x) · w3 x)."""

    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x_BSD), self.w3(x_BSD)))
