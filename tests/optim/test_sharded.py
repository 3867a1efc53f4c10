"""The optimizer and the gradient norm over DTensors: many cases in one world of four ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.helpers import run_world
from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.optim.grad_clip import clip_, global_norm
from toolkit.optim.optimizer import IMPLEMENTATIONS, build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.nonfinite import nonfinite_parameters

SHAPES = [(7, 5), (3,), (1, 4), (130, 8)]  # none divides evenly by four; some ranks hold nothing


def _gradients():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _norms_over_meshes():
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    layouts = [
        (line, [Shard(0)]),
        (line, [Replicate()]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Replicate()]),
    ]
    parameters = []
    for mesh, placements in layouts:
        for gradient in _gradients():
            parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, placements))
            parameter.grad = distribute_tensor(gradient, mesh, placements)
            parameters.append(parameter)
    norm = global_norm(parameters)
    clip_(parameters, 1.0, norm.item())
    clipped = global_norm(parameters)

    bad = parameters[3]
    bad.grad = distribute_tensor(
        torch.zeros(130, 8).index_fill(0, torch.tensor([129]), torch.nan), line, [Shard(0)]
    )
    names = nonfinite_parameters([("ok", parameters[0]), ("bad", bad)])

    refused = []
    partial = DTensor.from_local(torch.ones(3), line, [Partial()])
    for gradient in (torch.ones(3), partial):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        with pytest.raises(ValueError) as error:
            global_norm([parameter])
        refused.append(str(error.value))
    return norm.item(), clipped.item(), names, refused


class _Odd(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def _resume_is_bitwise(implementation):
    def make():
        model = _Odd()
        for unit in (model.a, model.b, model):
            fully_shard(unit)
        options = Optimizer(lr=1e-2, implementation=implementation)
        return model, build_optimizer(model.named_parameters(), Config(optimizer=options))

    def steps(model, optimizer, first, last):
        for step in range(first, last):
            torch.manual_seed(step * 4 + dist.get_rank())
            model(torch.randn(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def tensors(model, optimizer):
        named = dict(model.named_parameters())
        found = {f"model.{name}": p for name, p in named.items()} | optimizer_tensors(
            named.items(), optimizer
        )
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in found.items()}

    straight = make()
    steps(*straight, 0, 3)
    saved = {name: tensor.detach().clone() for name, tensor in tensors(*straight).items()}
    steps(*straight, 3, 6)

    resumed = make()
    with torch.no_grad():
        for name, tensor in tensors(*resumed).items():
            tensor.copy_(saved[name])
    steps(*resumed, 3, 6)
    expected = tensors(*straight)
    return [name for name, tensor in tensors(*resumed).items() if not torch.equal(tensor, expected[name])]


def _world():
    return _norms_over_meshes(), {name: _resume_is_bitwise(name) for name in IMPLEMENTATIONS}


@pytest.fixture(scope="module")
def world():
    return run_world(_world, 4)


def test_norm_counts_every_element_once_on_mixed_meshes(world):
    squares = 4 * sum(gradient.double().square().sum().item() for gradient in _gradients())
    for (norm, clipped, _, _), _ in world:
        assert norm == pytest.approx(squares**0.5, rel=1e-14)
        assert clipped == pytest.approx(1.0, rel=1e-6)


def test_norm_is_the_same_number_on_every_rank(world):
    assert len({norm for (norm, _, _, _), _ in world}) == 1


def test_only_the_rank_that_holds_the_nan_names_it(world):
    assert [names for (_, _, names, _), _ in world] == [[], [], [], ["bad"]]


def test_gradients_of_unknown_share_are_refused(world):
    for (_, _, _, (plain, partial)), _ in world:
        assert "plain" in plain and "reduced" in partial


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resume_is_bitwise(world, implementation):
    assert [result[implementation] for _, result in world] == [[], [], [], []]
