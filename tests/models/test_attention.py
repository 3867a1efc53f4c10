"""The attention back ends beside SDPA with a dense mask, as far as a CPU can run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from tests.models.attention_cases import (
    LENGTH,
    PACKED,
    PACKINGS,
    ROWS,
    WINDOWS,
    attend,
    by_definition,
    inputs,
    weighed,
    with_gradients,
)
from tests.models.small_llama import build, small, tokens_and_labels
from tests.models.varlen_on_cpu import give_varlen_a_cpu_kernel
from toolkit.models.common.attention import attention_backend
from toolkit.models.common.attention_choice import WITH_SINKS
from toolkit.models.common.attention_sdpa import attention_mask, causal_mask, cuda_kernels, sdpa
from toolkit.models.common.attention_varlen import document_bounds, query_bounds
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import resolve


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", [None, PACKED], ids=["causal", "packed"])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_flex_gives_what_sdpa_gives(kv_heads: int, documents: Tensor | None) -> None:
    qkv = inputs(8, kv_heads)
    # fp64 in another order; a token too many in a softmax over at most 200 is 1e-3.
    torch.testing.assert_close(
        attend("flex", qkv, documents), attend("sdpa", qkv, documents), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("documents", [None, PACKED], ids=["causal", "packed"])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_varlen_gives_what_sdpa_gives(kv_heads: int, documents: Tensor | None) -> None:
    give_varlen_a_cpu_kernel()
    qkv = inputs(8, kv_heads)
    for found, expected in zip(
        with_gradients("varlen", qkv, documents), with_gradients("sdpa", qkv, documents), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [8, 1])
def test_flash_gives_what_sdpa_gives_and_refuses_documents(kv_heads: int) -> None:
    qkv = inputs(8, kv_heads, torch.float32)
    for found, expected in zip(
        with_gradients("flash", qkv, None), with_gradients("sdpa", qkv, None), strict=True
    ):
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="supports no mask"):
        attend("flash", qkv, PACKED)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("pieces", [2, 4, 8])
@pytest.mark.parametrize("name", ["sdpa", "flash", "flex", "varlen", "blockwise"])
def test_pieces_of_the_queries_give_what_all_of_them_give(name: str, pieces: int) -> None:
    give_varlen_a_cpu_kernel()
    # As above: fp32 where the kernel wants it, no backward of flex.
    dtype = torch.float32 if name == "flash" else torch.float64
    near = {} if name == "flash" else {"rtol": 1e-12, "atol": 1e-12}
    function = attend if name == "flex" else with_gradients
    for documents in (None,) if name == "flash" else (None, *PACKINGS):
        qkv = inputs(8, 2, dtype)
        torch.testing.assert_close(
            function(name, qkv, documents, pieces), function("sdpa", qkv, documents), **near
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "flex", "varlen", "blockwise"])
def test_windows(name: str, chunked: bool, window: int) -> None:
    """Within them all back ends attend as the definition says, by pieces of the queries too."""
    give_varlen_a_cpu_kernel()
    qkv = [x.requires_grad_(name != "flex") for x in inputs(8, 2)]
    for documents in (None, *PACKINGS):
        out = by_definition(qkv, documents, window, chunked=chunked)
        expected = [out.detach()]
        if name != "flex":
            expected += torch.autograd.grad(weighed(out), qkv)
        for pieces in (1, 4):
            leaves = [x.detach() for x in qkv]
            function = attend if name == "flex" else with_gradients
            found = function(name, leaves, documents, pieces, window, chunked)
            torch.testing.assert_close(
                [found] if isinstance(found, Tensor) else found, expected, rtol=1e-12, atol=1e-12
            )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("name", WITH_SINKS)
def test_sinks(name: str, window: int | None) -> None:
    """They join the denominator, and have gradients, where there are documents and windows too."""
    backend: Any = attention_backend(name, window)
    sinks = torch.linspace(-3, 4, 8, dtype=torch.float64)
    leaves = [x.requires_grad_(name != "flex") for x in (*inputs(8, 2), sinks)]
    *qkv, sinks = leaves
    for documents in (None, PACKED):
        out = backend(*qkv, backend.mask(documents, ROWS, LENGTH, sinks.device), sinks_H=sinks)
        expected = by_definition(qkv, documents, window or LENGTH, sinks)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        if name != "flex":
            grads = [torch.autograd.grad(weighed(it), leaves) for it in (out, expected)]
            torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)


def test_only_some_backends_take_sinks() -> None:
    names = ("sdpa", "flash", "flex", "varlen", "blockwise")
    assert [name for name in names if attention_backend(name).takes_sinks] == list(WITH_SINKS)
    with pytest.raises(ValueError, match="Flash attention does not support sinks"):
        Decoder(resolve("gpt_oss", "debugmodel"), attention="flash")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "flash", "flex", "varlen", "blockwise"])
def test_a_window_that_hides_nothing_changes_nothing(name: str, chunked: bool) -> None:
    """Nor costs anything: the mask is the one without it."""
    cpu = torch.device("cpu")
    plain, windowed = attention_backend(name), attention_backend(name, LENGTH, chunked)
    for documents in (None,) if name == "flash" else (None, PACKED):
        masks = [backend.mask(documents, ROWS, LENGTH, cpu, first=50) for backend in (plain, windowed)]
        if name == "flex":
            masks = [mask.to_dense() for mask in masks]
        torch.testing.assert_close(*masks, rtol=0, atol=0)
    if name == "sdpa":
        assert windowed.mask(None, ROWS, LENGTH, cpu) is None
    if name == "flash":
        with pytest.raises(ValueError, match="supports no mask" if chunked else "beyond their window"):
            windowed.mask(None, ROWS, LENGTH + 1, cpu)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_mask_for_cuda_means_the_dense_one(kv_heads: int) -> None:
    q, k, v = inputs(8, kv_heads)
    dense, bias = (causal_mask(LENGTH, torch.device(device), 60) for device in ("cpu", "cuda"))
    assert dense is not None and type(bias) is CausalBias
    # The bias makes the same dense mask where no kernel has it built in.
    assert torch.equal(sdpa(q[:, 60:], k, v, bias), sdpa(q[:, 60:], k, v, dense))
    compiled = torch.compile(sdpa, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(
        compiled(q[:, 60:], k, v, bias), sdpa(q[:, 60:], k, v, dense), rtol=1e-12, atol=1e-12
    )


@st.composite
def packed_rows(draw: st.DrawFn) -> Tensor:
    """Up to four rows of equal length, cut into runs; neighbours differ within a row."""
    length = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))
        first = draw(st.integers(-1, 1))
        rows.append(torch.tensor([first, *cuts], dtype=torch.int64).cumsum(0))
    return torch.stack(rows)


@settings(max_examples=100, deadline=None)
@given(documents=packed_rows())
def test_document_bounds_mean_the_dense_mask(documents: Tensor) -> None:
    bounds = document_bounds(documents)
    assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == documents.numel()
    assert (bounds.diff() > 0).all()  # the kernel is not asked for empty documents
    tokens = torch.arange(documents.numel())
    index = torch.searchsorted(bounds, tokens, right=True)
    blocks = (index[:, None] == index).tril()
    dense = attention_mask(documents)
    assert dense is not None
    assert torch.equal(blocks, torch.block_diag(*dense[:, 0].int()).bool())


@settings(max_examples=100, deadline=None)
@given(documents=packed_rows(), data=st.data())
def test_query_bounds_mean_the_last_rows_of_the_mask(documents: Tensor, data: st.DataObject) -> None:
    rows, length = documents.shape
    first = data.draw(st.integers(0, length - 1))
    keys = document_bounds(documents)
    queries = query_bounds(keys, length, first)
    assert queries.dtype == torch.int32 and queries[-1] == rows * (length - first)
    dense = attention_mask(documents, first)[:, 0]
    blocks = torch.zeros(rows * (length - first), rows * length, dtype=torch.bool)
    for query, query_end, key, key_end in zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True):
        # The last queries of a document, none of one that has ended before: aligned at its last key.
        shape = int(query_end - query), int(key_end - key)
        assert 0 <= shape[0] <= shape[1]
        blocks[query:query_end, key:key_end] = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])
    assert torch.equal(blocks, torch.block_diag(*dense.int()).bool())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["flex", "varlen", "blockwise"])
def test_a_compiled_block_serves_every_packing(name: str) -> None:
    give_varlen_a_cpu_kernel()
    tokens, labels = tokens_and_labels(ROWS, LENGTH)
    args = small("mistral0.1", n_layers=1)
    assert args.sliding_window and args.sliding_window < LENGTH
    eager, compiled = build(args), build(args, attention=name)
    compiled.layers["0"] = checkpoint_wrapper(compiled.layers["0"])
    # aot_eager traces as inductor does, without its seconds of C++. A change of documents must not
    # compile again: the limit of recompilations would end the run after a few steps.
    compiled.layers["0"].compile(backend="aot_eager", fullgraph=True, dynamic=False)
    for step, documents in enumerate(PACKINGS):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            if name == "flex":  # has no backward on CPU
                with torch.no_grad():
                    found = compiled(tokens, documents=documents)
                    torch.testing.assert_close(
                        found, eager(tokens, documents=documents), rtol=1e-9, atol=1e-9
                    )
                continue
            losses = [model(tokens, documents=documents, labels=labels) for model in (compiled, eager)]
            torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
            for model, loss in zip((compiled, eager), losses, strict=True):
                model.zero_grad()
                loss.backward()
            for found, expected in zip(compiled.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)


CUDNN, FLASH, EFFICIENT = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
)
# Queries, keys, the kind of mask, dtype, whether gradients are wanted, and the kernels before the fallback.
CUDA_KERNELS = [
    (256, 256, None, torch.bfloat16, True, [CUDNN, FLASH, EFFICIENT]),
    (256, 256, None, torch.float16, True, [CUDNN, FLASH, EFFICIENT]),
    (320, 320, None, torch.bfloat16, True, [FLASH, EFFICIENT]),  # 64 modulo 128
    (256, 256, None, torch.bfloat16, False, [FLASH, EFFICIENT]),  # a plan for each length of a prompt
    (256, 256, "dense", torch.bfloat16, True, [EFFICIENT]),
    (128, 256, "lower right", torch.bfloat16, True, [FLASH, EFFICIENT]),
    (1, 256, None, torch.bfloat16, False, [FLASH, EFFICIENT]),
    (1, 256, "dense", torch.bfloat16, False, [EFFICIENT]),
    (256, 256, None, torch.float32, True, [EFFICIENT]),
    (256, 256, None, torch.float64, True, [EFFICIENT]),
]


@pytest.mark.parametrize(("queries", "keys", "kind", "dtype", "training", "kernels"), CUDA_KERNELS)
def test_kernels_of_cuda(
    queries: int, keys: int, kind: str | None, dtype: torch.dtype, training: bool, kernels: list[SDPBackend]
) -> None:
    mask = {
        None: None,
        "dense": torch.ones(queries, keys, dtype=torch.bool),
        "lower right": causal_lower_right(queries, keys),
    }[kind]
    q, k = (torch.empty(1, 2, length, 16, dtype=dtype) for length in (queries, keys))
    with torch.set_grad_enabled(training):
        assert cuda_kernels(q, k, mask) == [*kernels, SDPBackend.MATH]


@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 2), (torch.float32, 8)])
def test_keys_are_repeated_only_for_kernels_that_take_no_groups(
    dtype: torch.dtype, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: calls.append(k) or q)
    sdpa(*inputs(8, 2, dtype), None)
    assert calls[0].shape[1] == kv_heads


def test_a_compiled_block_takes_the_same_kernels() -> None:
    def attend(q: Tensor) -> Tensor:
        with sdpa_kernel(list(cuda_kernels(q, q, None)), set_priority=True):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 128, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attend(q))
