import pytest
import torch
from torch import nn

from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.optim.grad_clip import global_norm
from toolkit.optim.optimizer import IMPLEMENTATIONS, OPTIMIZERS, build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors

OPTIONS = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def _step(model, optimizer, step):
    torch.manual_seed(100 + step)
    model(torch.randn(4, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _make(model, implementation, **options):
    table = Optimizer(**OPTIONS | options, implementation=implementation)
    return build_optimizer(model.named_parameters(), Config(optimizer=table))


def test_implementations_ask_torch_for_their_kernels():
    flags = {name: _make(_model(), name).param_groups[0] for name in IMPLEMENTATIONS}
    assert {name: (group["foreach"], group["fused"]) for name, group in flags.items()} == {
        "for-loop": (False, False),
        "foreach": (True, False),
        "fused": (False, True),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_torchs_own(implementation, name):
    ours, theirs = _model(), _model()
    optimizer = _make(ours, implementation, name=name)
    options = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    reference = getattr(torch.optim, name)(theirs.parameters(), **options)
    for step in range(3):
        _step(ours, optimizer, step)
        _step(theirs, reference, step)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # the kernels order a few fp32 operations differently; updates are about 1e-2
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_adam_adds_the_decay_to_the_gradient_and_adamw_does_not():
    """A first update is of size lr against the sign of what the moments see: here decay · w = 1.8, g = −1."""
    for name, expected in (("Adam", 2.0 - 1e-2), ("AdamW", 2.0 * (1 - 1e-2 * 0.9) + 1e-2)):
        parameter = nn.Parameter(torch.tensor([2.0]))
        options = OPTIONS | {"weight_decay": 0.9}
        optimizer = build_optimizer(
            [("w", parameter)], Config(optimizer=Optimizer(**options, name=name, implementation="for-loop"))
        )
        parameter.grad = torch.tensor([-1.0])
        optimizer.step()
        assert parameter.item() == pytest.approx(expected, rel=1e-6), name


def test_patterns_of_clean_names_are_not_decayed():
    model = _model()
    named = [(f"_orig_mod.{name}", parameter) for name, parameter in model.named_parameters()]
    options = OPTIONS | {"no_decay": ["*.bias", "0.weigh?"]}
    optimizer = build_optimizer(named, Config(optimizer=Optimizer(**options, implementation="foreach")))
    decays = {
        name: group["weight_decay"] for group in optimizer.param_groups for name in group["param_names"]
    }
    assert decays == {"0.weight": 0.0, "0.bias": 0.0, "2.weight": 0.1, "2.bias": 0.0}
    # Nothing that is decayed is left: no empty group, which torch's kernels would choke on.
    every = build_optimizer(
        named, Config(optimizer=Optimizer(**OPTIONS, no_decay=["*"], implementation="foreach"))
    )
    assert [group["weight_decay"] for group in every.param_groups] == [0.0]


def test_groups_change_neither_the_names_nor_the_order_of_a_checkpoint():
    model = _model()
    plain, grouped = _make(model, "fused"), _make(model, "fused", no_decay=["*.bias"])
    names = [list(optimizer_tensors(model.named_parameters(), optimizer)) for optimizer in (plain, grouped)]
    assert names[0] == names[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_in_backward_is_the_step_after_it(implementation, name):
    """Bit for bit, each group with its own decay, at a rate that changes."""
    models, norms = [_model(), _model()], [[], []]
    for model, early, found in zip(models, (True, False), norms, strict=True):
        options = dict(name=name, no_decay=["*.bias"], early_step_in_backward=early)
        optimizer = _make(model, implementation, **options)
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (step + 1)
            torch.manual_seed(step)
            model(torch.randn(4, 7)).square().mean().backward()
            found.append(
                optimizer.gradient_norm(device=torch.device("cpu")).item()
                if early
                else global_norm(model.parameters()).item()
            )
            assert all((parameter.grad is None) == early for parameter in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, other)
    assert norms[0] == pytest.approx(norms[1], rel=1e-14)


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
    optimizer = build_optimizer(named, Config(optimizer=Optimizer(**OPTIONS, implementation="for-loop")))
    frozen = model[0].weight.clone()
    _step(model, optimizer, 0)
    assert torch.equal(model[0].weight, frozen)
    parts = ("step", "exp_avg", "exp_avg_sq")
    expected = {f"optim.layers.{name}.{part}" for name in ("0.bias", "2.weight", "2.bias") for part in parts}
    assert optimizer_tensors(named, optimizer).keys() == expected


def test_a_stage_that_is_all_frozen_has_an_optimizer_that_does_nothing():
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = build_optimizer([("frozen", frozen)], Config())
    optimizer.step()
    assert optimizer_tensors([("frozen", frozen)], optimizer) == {}
    assert torch.equal(frozen, torch.ones(2))


def test_state_is_never_left_out_of_a_checkpoint_in_silence():
    optimizer = _make(_model(), "for-loop")
    with pytest.raises(AssertionError, match="0.weight is trained, but not by this optimizer"):
        optimizer_tensors(_model().named_parameters(), optimizer)
