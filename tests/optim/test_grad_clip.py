import pytest
import torch
from torch import nn

from toolkit.optim.grad_clip import clip_, global_norm
from toolkit.parallel.nonfinite import nonfinite_parameters


def _parameters(*gradients):
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        parameters.append(parameter)
    return parameters


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_norm_is_exact_where_fp32_squares_overflow():
    parameters = _parameters(torch.full((3,), 1e25), torch.full((2,), 1e25))
    # fp64 holds 1e50; what remains is the rounding of 1e25 to fp32, known exactly
    expected = float(torch.tensor(1e25)) * 5**0.5
    assert global_norm(parameters).item() == pytest.approx(expected, rel=1e-14)


def test_norm_leaves_out_parameters_without_gradient_and_empty_ones():
    parameters = [*_parameters(torch.tensor([3.0, 4.0]), torch.zeros(0, 5)), nn.Parameter(torch.ones(3))]
    assert global_norm(parameters).item() == 5.0


def test_norm_is_on_the_device_asked_for_wherever_the_gradients_are():
    norm = global_norm(_parameters(torch.ones(3)), device=torch.device("meta"))
    assert norm.device.type == "meta" and norm.dtype == torch.float64


def test_clipping_equals_torchs_own():
    ours, theirs = _parameters(_random(40, 7), _random(9)), _parameters(_random(40, 7), _random(9))
    clip_(ours, 1.5, global_norm(ours).item())
    torch.nn.utils.clip_grad_norm_(theirs, 1.5)
    for mine, other in zip(ours, theirs, strict=True):
        # torch takes the norm in fp32: one rounding of the factor, one of the product
        torch.testing.assert_close(mine.grad, other.grad, rtol=4e-7, atol=0)
    assert global_norm(ours).item() == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("max_norm", [1e6, 0.0, -1.0, float("inf")])
def test_gradients_are_untouched_when_small_enough_or_clipping_is_off(max_norm):
    parameters = _parameters(_random(5, 3))
    clip_(parameters, max_norm, global_norm(parameters).item())
    assert torch.equal(parameters[0].grad, _random(5, 3))


def test_clips_each_dtype():
    parameters = _parameters(torch.full((4,), 3.0), torch.full((4,), 4.0, dtype=torch.bfloat16))
    clip_(parameters, 5.0, global_norm(parameters).item())
    assert [parameter.grad.dtype for parameter in parameters] == [torch.float32, torch.bfloat16]
    # from norm 10 to 5; bfloat16 keeps 8 bits
    assert parameters[0].grad.tolist() == pytest.approx([1.5] * 4, rel=1e-6)
    assert parameters[1].grad.tolist() == pytest.approx([2.0] * 4, rel=2**-8)


def test_names_what_is_not_finite():
    good, nan, infinite, largest = _parameters(
        torch.ones(2),
        torch.tensor([1.0, float("nan")]),
        torch.tensor([float("-inf"), 0.0]),
        torch.full((2,), 3e38),
    )
    named = [
        ("good", good),
        ("nan", nan),
        ("inf", infinite),
        ("large", largest),
        ("none", nn.Parameter(torch.ones(1))),
    ]
    assert nonfinite_parameters(named) == ["nan", "inf"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_accumulates_in_fp64_and_does_not_wait():
    parameters = [nn.Parameter(torch.zeros(2**24, device="cuda")) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e25)
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = global_norm(parameters)
        clip_(parameters, 1.0, 1e29)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = float(torch.tensor(1e25)) * 2**12.5
    assert norm.item() == pytest.approx(expected, rel=1e-12)
