"""Small models with weights that show mistakes, for the tests of this folder."""

from __future__ import annotations

from dataclasses import replace

import torch

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameter_table import Init
from toolkit.models.parameters import init_rule
from toolkit.models.registry import resolve
from toolkit.parallel.init_weights import initialize

VOCAB = 307


def small(name: str = "llama3.1", **overrides) -> ModelArgs:
    """A few layers; scaled names get an original context of 64, so that 200 tokens feel all three bands."""
    shape = dict(dim=64, n_layers=3, n_heads=8, n_kv_heads=2, ffn_dim=96, head_dim=32, vocab_size=VOCAB)
    args = resolve(name, "debugmodel", **shape | overrides)
    if args.rope_scaling is None:
        return args
    return replace(args, rope_scaling=replace(args.rope_scaling, original_max_seq_len=64))


def build(args: ModelArgs, dtype: torch.dtype = torch.float64, **options) -> Decoder:
    """Random weights with which attention is far from uniform, so that a wrong angle or mask shows."""

    def rule(name: str) -> Init:
        if name.endswith("bias"):
            return Init(std=0.05)
        return Init(std=0.2) if name.endswith(("wq.weight", "wk.weight")) else init_rule(name, args)

    model = Decoder(args, **options).to(dtype)
    initialize(model.named_parameters(), 1, rule)
    return model


def tokens_and_labels(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (rows, length), generator=generator)
    labels = torch.randint(VOCAB, (rows, length), generator=generator)
    labels[:, ::7] = -100
    return tokens, labels
