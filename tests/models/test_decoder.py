import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.models.small_llama import VOCAB, build, small, tokens_and_labels
from toolkit.models.common.attention_sdpa import attention_mask, sdpa
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.rope import rope_rotations
from toolkit.models.llama.args import PRESETS
from toolkit.models.parameters import init_rule, parameter_count, parameter_shapes
from toolkit.models.registry import resolve
from toolkit.parallel.init_weights import initialize


def gradients(model: Decoder, tokens: torch.Tensor, **inputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(tokens, **inputs)
    loss.backward()
    names = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    return loss.detach(), {name: p.grad.clone() for name, p in names.items()}


def assert_same(found: tuple, expected: tuple, tolerance: float) -> None:
    assert abs(found[0] - expected[0]) <= tolerance * abs(expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert (found[1][name] - grad).norm() <= tolerance * grad.norm(), name


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_on_the_meta_device_has_its_parameter_count(name):
    for flavor, args in PRESETS[name].items():
        with torch.device("meta"):
            model = Decoder(args)
        assert sum(p.numel() for p in model.parameters()) == parameter_count(args), flavor


def test_parameter_shapes_are_metas():
    blocks = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    blocks += ["feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "attention_norm", "ffn_norm"]
    names = {f"layers.{layer}.{part}.weight" for layer in range(3) for part in blocks}
    names |= {"tok_embeddings.weight", "norm.weight", "output.weight"}
    assert {name for name, _ in Decoder(small()).named_parameters()} == names
    tied = Decoder(small("llama3.2"))
    assert {name for name, _ in tied.named_parameters()} == names - {"output.weight"}
    assert set(tied.state_dict()) == names - {"output.weight"}


@pytest.mark.parametrize("name", ["llama3.1", "llama3.2"], ids=["untied", "tied"])
def test_parameter_shapes_are_known_without_the_model(name):
    args = small(name)
    assert list(parameter_shapes(args)) == [name for name, _ in Decoder(args).named_parameters()]


def test_a_stage_without_blocks_makes_no_mask(monkeypatch):
    model, (tokens, labels) = build(small()), tokens_and_labels(2, 10)
    hidden = model.tok_embeddings(tokens)
    head = model.output(model.norm(hidden), labels)
    model.layers.clear()
    [backend] = model.backends.values()
    monkeypatch.delattr(type(backend), "mask")
    assert model(tokens, documents=tokens, labels=labels) == head
    model.norm = model.output = None
    assert model(tokens, documents=tokens).equal(hidden)


def test_a_tied_head_stays_tied_when_storage_is_replaced():
    with torch.device("meta"):
        model = Decoder(small("llama3.2"))
    model = model.to_empty(device="cpu").double()
    initialize(model.named_parameters(), 1, lambda name: init_rule(name, model.args))
    tokens, _ = tokens_and_labels(1, 4)
    before = model(tokens)
    with torch.no_grad():
        model.tok_embeddings.weight[VOCAB - 1] *= 2
    # The last word is not among the tokens: only its logit can change, and it doubles.
    assert VOCAB - 1 not in tokens
    torch.testing.assert_close(model(tokens)[..., -1], 2 * before[..., -1])


@pytest.mark.parametrize("name", ["llama3", "llama3.2"])
def test_loss_starts_near_that_of_a_uniform_guess(name):
    args = resolve(name, "debugmodel", vocab_size=4096, n_layers=3)
    model = Decoder(args)
    initialize(model.named_parameters(), 1, lambda parameter: init_rule(parameter, args))
    tokens = torch.randint(4096, (2, 129), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], labels=tokens[:, 1:]).item() / 256
    # Logits of variance one put the expectation at ln(V) + 1/2; a tied head of variance one is far above.
    assert math.log(4096) - 0.1 < loss < math.log(4096) + 0.6


def test_logits_depend_on_no_later_token():
    model = build(small())
    tokens, _ = tokens_and_labels(1, 40)
    changed = tokens.clone()
    changed[0, 25] = (changed[0, 25] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert (before[:, 25:] - after[:, 25:]).abs().amax(-1).min() > 1e-6


def test_positions_matter_by_their_differences_alone():
    model = build(small())
    tokens, _ = tokens_and_labels(2, 50)
    positions = torch.arange(50).expand(2, 50)
    expected = model(tokens)
    torch.testing.assert_close(model(tokens, positions=positions), expected)
    # fp64 angles near 100,000 radians are good to 1e-11.
    torch.testing.assert_close(model(tokens, positions=positions + 100_000), expected, rtol=1e-8, atol=1e-8)
    assert (model(tokens, positions=2 * positions) - expected).abs().max() > 1e-2


def test_rotations_stay_precise_far_out_and_follow_the_dtype():
    args = PRESETS["llama3.1"]["8B"]
    positions = torch.tensor([131_071])
    exact = rope_rotations(args, positions, torch.float64)
    rounded = rope_rotations(args, positions, torch.bfloat16)
    assert (exact.dtype, rounded.dtype) == (torch.float64, torch.float32)
    # One rounding to fp32 of a number up to 1; fp32 angles would be 1e-2 off.
    assert (rounded - exact).abs().max() < 1e-7


def pack(tokens, labels, lengths, padding):
    """Cut one row into documents of these lengths, the tail being padding; and the documents alone."""
    documents, positions, alone, start = [], [], [], 0
    for index, length in enumerate(lengths):
        documents += [index] * length
        positions += range(length)
        alone.append((tokens[:, start : start + length], labels[:, start : start + length]))
        start += length
    packed_labels = labels.clone()
    packed_labels[:, start:] = -100
    documents = torch.tensor([documents + [-1] * padding])
    return documents, torch.tensor([positions + list(range(padding))]), packed_labels, alone


@pytest.mark.parametrize("name", ["llama3.0", "llama3.2"])
@pytest.mark.parametrize("chunk", [0, 17])
def test_packed_documents_equal_documents_alone(name, chunk):
    model = build(small(name), loss_chunk_tokens=chunk)
    tokens, labels = tokens_and_labels(1, 90)
    documents, positions, packed_labels, alone = pack(tokens, labels, [1, 30, 44], padding=15)
    inputs = dict(documents=documents, positions=positions, labels=packed_labels)
    packed = gradients(model, tokens, **inputs)
    pieces = [gradients(model, t, labels=lab) for t, lab in alone]
    loss = sum(piece[0] for piece in pieces)
    grads = {n: sum(piece[1][n] for piece in pieces) for n in packed[1]}
    # Only the order of fp64 sums differs: about 1e-15 a term.
    assert_same(packed, (loss, grads), 1e-12)
    # And the mask matters: without it the documents see one another.
    leaky = model(tokens, positions=positions, labels=packed_labels)
    assert abs(leaky - loss) > 1e-3


def test_documents_may_be_numbered_in_any_way_and_differ_by_row():
    model = build(small())
    tokens, _ = tokens_and_labels(2, 12)
    documents = torch.tensor([[5] * 7 + [2] * 5, [-1] * 3 + [900] * 9])
    logits = model(tokens, documents=documents)
    assert logits.isfinite().all()
    for row, cut in ((0, 7), (1, 3)):
        positions = torch.arange(cut, 12)[None]
        tail = model(tokens[row : row + 1, cut:], positions=positions)
        torch.testing.assert_close(logits[row, cut:], tail[0])


def test_masked_attention_of_one_document_is_causal_attention():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 20, 8, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 20, 2, 16, generator=generator, dtype=torch.float64)
    mask = attention_mask(torch.zeros(2, 20, dtype=torch.int64))
    torch.testing.assert_close(sdpa(q, k, v, mask), sdpa(q, k, v, None))


@pytest.mark.parametrize("name", ["llama3.1", "llama3.2"])
def test_activation_checkpointing_changes_no_gradient(name):
    tokens, labels = tokens_and_labels(2, 33)
    inputs = dict(documents=torch.arange(33).div(11, rounding_mode="floor").expand(2, 33), labels=labels)
    expected = gradients(build(small(name)), tokens, **inputs)
    model = build(small(name))
    for index in model.layers:
        model.layers[index] = checkpoint_wrapper(model.layers[index])
    loss, grads = gradients(model, tokens, **inputs)
    # The same operations on the same numbers.
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(grads[name], grad) for name, grad in expected[1].items())


@pytest.mark.parametrize("documents", [False, True])
def test_a_compiled_block_has_no_graph_break_and_the_same_gradients(documents):
    tokens, labels = tokens_and_labels(2, 16)
    inputs = dict(labels=labels)
    if documents:
        inputs["documents"] = torch.arange(16).div(5, rounding_mode="floor").expand(2, 16)
    expected = gradients(build(small(n_layers=1)), tokens, **inputs)
    model = build(small(n_layers=1))
    # aot_eager traces forward and backward as inductor does, without its seconds of C++.
    model.layers["0"].compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same(gradients(model, tokens, **inputs), expected, 1e-12)


@settings(max_examples=15, deadline=None)
@given(chunk=st.integers(0, 50), rows=st.integers(1, 3), length=st.integers(1, 15))
def test_chunks_change_neither_loss_nor_gradients(chunk, rows, length):
    tokens, labels = tokens_and_labels(rows, length)
    expected = gradients(build(small(n_layers=1), loss_chunk_tokens=0), tokens, labels=labels)
    found = gradients(build(small(n_layers=1), loss_chunk_tokens=chunk), tokens, labels=labels)
    # Only the order of fp64 sums differs.
    assert abs(found[0] - expected[0]) <= 1e-12 * expected[0]
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-9, atol=1e-12)


def test_bf16_parameters_give_bf16_logits_and_an_fp32_loss():
    tokens, labels = tokens_and_labels(1, 20)
    model = build(small(), torch.bfloat16)
    assert model(tokens).dtype == torch.bfloat16
    assert model(tokens, labels=labels).dtype == torch.float32
    exact = build(small(), torch.float64)
    assert exact(tokens, labels=labels).dtype == torch.float64


@pytest.mark.parametrize("name", ["llama3.1"])
def test_stages_of_a_pipeline_make_the_whole(name):
    tokens, labels = tokens_and_labels(2, 20)
    expected = gradients(build(small(name)), tokens, labels=labels)
    first, last = build(small(name)), build(small(name))
    del first.layers["1"], first.layers["2"], last.layers["0"]
    first.norm = first.output = last.tok_embeddings = None
    loss = last(first(tokens), labels=labels)
    loss.backward()
    grads = {name: p.grad for stage in (first, last) for name, p in stage.named_parameters()}
    assert_same((loss.detach(), grads), expected, 1e-12)
