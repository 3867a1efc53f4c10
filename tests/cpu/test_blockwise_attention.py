"""Attention by blocks beside SDPA with a dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.models.attention_cases import LENGTH, PACKED, PACKINGS, attend, inputs, with_gradients
from toolkit.cpu import blockwise_attention


@pytest.mark.parametrize("documents", [None, *PACKINGS], ids=["causal", "packed", "whole", "many"])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_blockwise_gives_what_sdpa_gives(kv_heads: int, documents: Tensor | None) -> None:
    qkv = inputs(8, kv_heads)
    for found, expected in zip(
        with_gradients("blockwise", qkv, documents), with_gradients("sdpa", qkv, documents), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_blockwise_takes_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = inputs(8, 4)
    expected = with_gradients("blockwise", qkv, PACKED)
    group, queries = 2, blockwise_attention._QUERY_BYTES // 8
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(blockwise_attention, "_SCORE_BYTES", 3 * 8 * group * queries * queries)
    heads = [block.heads for block in blockwise_attention._blocks(*_one_row(qkv), None)]
    assert heads[:2] == [slice(0, 3), slice(3, 4)], "not what is to be tested"
    for found, whole in zip(with_gradients("blockwise", qkv, PACKED), expected, strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


def _one_row(qkv: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Queries (1, K, G, Q, E) and keys (1, K, E, S) of the first row."""
    q_1QHE, k_1SKE = qkv[0][:1], qkv[1][:1]
    return blockwise_attention._by_key_head(q_1QHE, k_1SKE.shape[2]), k_1SKE.permute(0, 2, 3, 1)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("documents", [None, PACKED], ids=["causal", "packed"])
def test_blockwise_loses_no_more_in_16_bits_than_sdpa(
    monkeypatch: pytest.MonkeyPatch, documents: Tensor | None, tiles: bool
) -> None:
    monkeypatch.setattr(blockwise_attention, "has_tiles", lambda: tiles)
    rounded = inputs(8, 2, torch.bfloat16)
    truth = with_gradients("sdpa", [x.double() for x in rounded], documents)
    distances = [
        [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
        for found in (with_gradients(name, rounded, documents) for name in ("blockwise", "sdpa"))
    ]
    own = documents is not None or not tiles
    assert (distances[0][0] != distances[1][0]) == own, "torch's kernel is for whole rows, on tiles"
    # Its weights have 8 bits where the kernel's result alone has: both are some roundings of 2^-9.
    assert max(distances[0]) < 2 * max(distances[1]) < 2**-6, distances


def test_blockwise_is_an_operator_that_torch_can_compile() -> None:
    q, k, v = (x[:, :40, :, :8].clone().requires_grad_() for x in inputs(4, 2))
    starts = blockwise_attention.document_starts(PACKED[:, 100:140])
    for mask in (None, starts):
        torch.library.opcheck(blockwise_attention.attend, (q, k, v, mask))


def test_blockwise_computes_no_block_that_a_window_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, seen = inputs(8, 2), []
    blocks = blockwise_attention._blocks

    def counted(*arguments):
        for block in blocks(*arguments):
            seen.append(block.keys.stop - block.keys.start)
            yield block

    monkeypatch.setattr(blockwise_attention, "_blocks", counted)
    attend("blockwise", qkv, None, window=20)
    queries = blockwise_attention._QUERY_BYTES // 8
    assert max(seen) == queries + 19 and len(seen) == -(-LENGTH // queries), "not of all rows at once"
