"""The forecast of a step's time: pieces that add up, schedules with their known bubbles, links by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import small_config
from toolkit.config import Config
from toolkit.metrics.flops import flops_per_token
from toolkit.models.common.args import ModelArgs
from toolkit.models.from_config import model_args
from toolkit.planner.costs import Costs, Piece, costs
from toolkit.planner.machines import Machine

MACHINE = Machine(
    name="round", memory=1e9, peak={"float32": 1e9, "bfloat16": 4e9}, matmul=0.5, attention=0.25,
    bandwidth=1e9, node=8, link=100.0, network=10.0, link_latency=0.0, network_latency=0.0, launch=0.0,
)  # fmt: skip


def planned(tmp_path: Path, **tables: dict[str, Any]) -> tuple[Config, ModelArgs]:
    config = small_config(tmp_path, **tables)
    return config, model_args(config, tokenizer_vocab=256)


def found(config: Config, args: ModelArgs, tp: int = 1, cp: int = 1, *, checkpointed: bool = True) -> Costs:
    return costs(config, args, tp=tp, cp=cp, rows=2, checkpointed=checkpointed, param_dtype=torch.bfloat16)


def products(piece: Piece) -> float:
    return sum(work.flops("matmul") for work in (piece.forward, piece.backward))


# Costs


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_products_are_the_flops_of_the_metrics(tmp_path: Path, ranks: tuple[int, int]) -> None:
    config, args = planned(tmp_path, training={"seq_len": 64, "loss_chunk_tokens": 0})
    tp, cp = ranks
    pieces = found(config, args, tp, cp, checkpointed=False)
    length, tokens = config.training.seq_len, 2 * config.training.seq_len
    blocks = products(pieces.first) + (args.n_layers - 1) * products(pieces.block)
    linear = (blocks + products(pieces.head)) * tp * cp
    norms = 6 * args.dim + 12 * args.dim * args.n_layers  # of the count, which has no products for them
    square = 12 * args.n_layers * args.n_heads * args.head_dim * length
    assert linear == tokens * (flops_per_token(args, seq_len=length) - square - norms)
    # Attention: what is seen, of which the backward computes the scores again.
    attended = pieces.block.forward.flops("attention") * tp * cp
    assert attended * 2 * args.n_layers * 3 == pytest.approx(tokens * square, rel=0.02)
    assert pieces.block.backward.flops("attention") == 2.5 * pieces.block.forward.flops("attention")
