import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import toolkit.loss as loss_module
from toolkit.loss import chunked_loss, linear_losses, token_losses
from toolkit.models.common.loss_terms import regularized_losses


def head(hidden, weight, labels):
    return token_losses(F.linear(hidden, weight), labels)


def problem(tokens: int, dim: int = 8, vocab: int = 50, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, dim, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::3] = -100
    return hidden, weight, labels


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_regularized_losses_are_torchs_smoothing_and_palms_z_loss():
    hidden, weight, labels = problem(20)
    logits = hidden @ weight.T
    found = regularized_losses(logits, labels, smoothing=0.1, z_loss=0.5)
    smooth = F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    expected = smooth + 0.5 * logits.exp().sum(-1).log() ** 2 * (labels != -100)
    torch.testing.assert_close(found, expected)
    assert (found[labels == -100] == 0).all() and found.dtype == torch.float64
    assert regularized_losses(logits.bfloat16(), labels, smoothing=0, z_loss=0).dtype == torch.float32


def test_losses_of_valid_tokens():
    hidden, weight, labels = problem(20)
    logits = hidden @ weight.T
    expected = -sum(logits[t].log_softmax(-1)[labels[t]] for t in range(20) if labels[t] != -100)
    torch.testing.assert_close(token_losses(logits, labels).sum(), expected)


@pytest.mark.parametrize("chunk", [0, 4, 100])
def test_no_valid_token_gives_zero_loss_and_zero_gradients(chunk):
    hidden, weight, labels = problem(20)
    loss = chunked_loss(head, hidden, weight, torch.full_like(labels, -100), chunk_tokens=chunk).sum()
    loss.backward()
    assert loss == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_precision_is_never_below_fp32_nor_below_the_inputs():
    hidden, weight, labels = problem(2000, dtype=torch.bfloat16)
    logits = (hidden @ weight.T).detach()
    loss = token_losses(logits, labels)
    assert loss.dtype == torch.float32
    # bf16 has 8 bits: computed in it, the sum would be off by about 1e-2.
    precise = token_losses(logits.double(), labels).sum()
    torch.testing.assert_close(loss.double().sum(), precise, rtol=1e-6, atol=0)
    assert token_losses(logits.double(), labels).dtype == torch.float64


@pytest.mark.parametrize("chunk", [1, 7, 19, 20, 21, 0])
def test_chunks_of_any_size_give_the_same(chunk):
    hidden, weight, labels = problem(20)
    expected = head(hidden, weight, labels)
    grads = torch.autograd.grad(expected.sum(), [hidden, weight])
    loss = chunked_loss(head, hidden, weight, labels, chunk_tokens=chunk)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), [hidden, weight]), grads)


def test_only_the_logits_of_one_chunk_ever_exist():
    hidden, weight, labels = problem(64, dim=8, vocab=500)
    with Largest() as seen:
        chunked_loss(head, hidden, weight, labels, chunk_tokens=16).sum().backward()
    assert seen.elements == 16 * 500


def test_chunked_logits_are_not_kept_for_backward():
    hidden, weight, labels = problem(64, dim=8, vocab=500)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chunked_loss(head, hidden, weight, labels, chunk_tokens=16)
    assert max(kept, default=0) <= weight.numel()


def test_a_single_chunk_is_computed_once():
    calls = []

    def counted(*args):
        calls.append(1)
        return head(*args)

    hidden, weight, labels = problem(20)
    chunked_loss(counted, hidden, weight, labels, chunk_tokens=20).sum().backward()
    assert len(calls) == 1
    chunked_loss(counted, hidden, weight, labels, chunk_tokens=10).sum().backward()
    assert len(calls) == 1 + 2 * 2


@pytest.mark.parametrize("trained", ["both", "hidden", "weight"])
def test_linear_losses_are_those_of_logits(trained, monkeypatch):
    """In pieces of two tokens, with a gradient for each token of its own."""
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", 100)
    hidden, weight, labels = problem(21)
    leaves = {"both": [hidden, weight], "hidden": [hidden], "weight": [weight]}[trained]
    for leaf in {hidden, weight} - set(leaves):
        leaf.requires_grad_(False)
    upstream = torch.linspace(-1, 2, 21, dtype=torch.float64)
    found, expected = linear_losses(hidden, weight, labels), head(hidden, weight, labels)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(losses, leaves, upstream) for losses in (found, expected)]
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        assert torch.equal(linear_losses(hidden, weight, labels), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_of_a_sum_the_gradient_is_that_of_equal_numbers(dtype):
    hidden, weight, labels = problem(21, dtype=dtype)
    of_sum, of_each = (
        torch.autograd.grad(linear_losses(hidden, weight, labels), [hidden, weight], upstream)
        for upstream in (torch.tensor(1 / 3).expand(21), torch.full((21,), 1 / 3))
    )
    assert all(torch.equal(one, each) for one, each in zip(of_sum, of_each, strict=True))


def test_gradients_in_bf16_are_as_near_to_exact_ones():
    hidden, weight, labels = problem(200, dim=64, vocab=500, dtype=torch.bfloat16)
    precise = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact = torch.autograd.grad(head(*precise, labels).sum() / 133, precise)
    errors = []
    for loss in (linear_losses, head):
        found = torch.autograd.grad(loss(hidden, weight, labels).sum() / 133, [hidden, weight])
        errors.append(
            [(mine - whole).norm() / whole.norm() for mine, whole in zip(found, exact, strict=True)]
        )
    # The products round once more or less, which is as much as they round at all.
    assert all(mine < 1.5 * theirs for mine, theirs in zip(*errors, strict=True))


def test_of_a_frozen_head_no_logits_are_kept_nor_computed_again():
    hidden, weight, labels = problem(64, dim=8, vocab=500)
    weight.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        loss = chunked_loss(linear_losses, hidden, weight, labels, chunk_tokens=16, recompute=False)
    assert max(shape.numel() for shape in kept) == 16 * 8
    grad = torch.autograd.grad(loss.sum(), hidden)
    torch.testing.assert_close(grad, torch.autograd.grad(head(hidden, weight, labels).sum(), hidden))


@pytest.mark.parametrize("trained", [True, False])
def test_a_second_backward_is_refused_since_the_first_writes_over_what_was_kept(trained):
    hidden = torch.randn(8, 16, requires_grad=True)
    weight = torch.randn(30, 16, requires_grad=trained)
    loss = linear_losses(hidden, weight, torch.arange(8)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
