import pytest
import torch
from torch import nn

from toolkit.optim.optimizer import IMPLEMENTATIONS, build_optimizer, optimizer_tensors

OPTIONS = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _step(model, optimizer, step):
    torch.manual_seed(100 + step)
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _make(model, implementation):
    return build_optimizer(model.named_parameters(), **OPTIONS, implementation=implementation)


def test_implementations_ask_torch_for_their_kernels():
    flags = {name: _make(_model(), name).param_groups[0] for name in IMPLEMENTATIONS}
    assert {name: (group["foreach"], group["fused"]) for name, group in flags.items()} == {
        "for-loop": (False, False),
        "foreach": (True, False),
        "fused": (False, True),
    }


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_torchs_adamw(implementation):
    ours, theirs = _model(), _model()
    optimizer = _make(ours, implementation)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        _step(ours, optimizer, step)
        _step(theirs, reference, step)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # the kernels order a few fp32 operations differently; updates are about 1e-2
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_state_made_before_the_first_step_is_what_torch_makes(implementation):
    early, late = _model(), _model()
    early_optimizer, late_optimizer = _make(early, implementation), _make(late, implementation)
    made = optimizer_tensors(early.named_parameters(), early_optimizer)
    for tensor in made.values():
        assert not tensor.any() and not tensor.requires_grad
    _step(early, early_optimizer, 0)
    _step(late, late_optimizer, 0)
    theirs = optimizer_tensors(late.named_parameters(), late_optimizer)
    assert made.keys() == theirs.keys()
    for name in made:
        assert torch.equal(made[name], theirs[name]), name
        assert (made[name].dtype, made[name].device) == (theirs[name].dtype, theirs[name].device), name


def test_names_are_clean_and_what_is_frozen_has_no_state():
    model = _model()
    model[0].weight.requires_grad_(False)
    named = [
        (f"layers._orig_mod.{name.replace('.', '._checkpoint_wrapped_module.', 1)}", parameter)
        for name, parameter in model.named_parameters()
    ]
    optimizer = build_optimizer(named, **OPTIONS, implementation="for-loop")
    frozen = model[0].weight.clone()
    _step(model, optimizer, 0)
    assert torch.equal(model[0].weight, frozen)
    parts = ("step", "exp_avg", "exp_avg_sq")
    expected = {f"optim.layers.{name}.{part}" for name in ("0.bias", "2.weight", "2.bias") for part in parts}
    assert optimizer_tensors(named, optimizer).keys() == expected


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError):
        build_optimizer([], **OPTIONS, implementation="fused")


def test_state_is_never_left_out_of_a_checkpoint_in_silence():
    optimizer = _make(_model(), "for-loop")
    with pytest.raises(AssertionError, match="0.weight is trained, but not by this optimizer"):
        optimizer_tensors(_model().named_parameters(), optimizer)
