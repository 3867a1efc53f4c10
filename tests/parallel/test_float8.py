"""Linear layers in float8: a layer is that of torchao, and a run on any mesh that of one process."""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests import meshes
from tests.curves import few_tokens
from tests.helpers import run_world
from tests.integration.test_meshes import run_all
from tests.mesh_runs import Result, added_up, planned, problems
from tests.training import small_config, small_trainer

pytest.importorskip("torchao")

from torchao.float8.config import Float8LinearConfig  # noqa: E402
from torchao.float8.float8_linear import Float8Linear as Theirs  # noqa: E402
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax  # noqa: E402

from toolkit.config.parallelism import Float8 as Options  # noqa: E402
from toolkit.distributed.dtensor import local  # noqa: E402
from toolkit.errors import ConfigError  # noqa: E402
from toolkit.models.common.decoder import Decoder  # noqa: E402
from toolkit.models.registry import resolve  # noqa: E402
from toolkit.parallel.converters import Converters  # noqa: E402
from toolkit.parallel.float8 import ShardedFloat8Linear, apply_float8  # noqa: E402
from toolkit.trainer import Trainer  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # the first test waits for all runs

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def _products(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    out = layer(x)
    out.backward(grad)
    assert x.grad is not None and isinstance(layer.weight.grad, torch.Tensor)
    return [out.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("emulate", [True, False])
def test_layer_is_that_of_torchao(recipe: str, dtype: torch.dtype, emulate: bool) -> None:
    """Bit for bit: output and both gradients. Not emulated, by torch's own product of float8 on the CPU."""
    if not (meshes.SINCE_2_13 or emulate or recipe == "tensorwise"):
        pytest.skip("torch's product of float8 on a CPU has one scale a matrix")
    torch.manual_seed(0)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    plain = nn.Linear(48, 80, bias=False, dtype=dtype)
    x, grad = torch.randn(2, 16, 48, dtype=dtype), torch.randn(2, 16, 80, dtype=dtype)
    found = _products(ShardedFloat8Linear(plain, config), x, grad)
    expected = _products(Theirs.from_float(plain, config), x, grad)
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True] * 3
    exact = _products(plain, x, grad)
    for mine, whole in zip(found, exact, strict=True):
        error = ((mine - whole).float().norm() / whole.float().norm()).item()
        assert error < 0.1  # three bits after the point, 6% at most in each factor
    assert not torch.equal(found[0], exact[0])


def test_a_layer_that_is_no_plain_one_is_refused_or_left_out() -> None:
    class Own(nn.Linear):
        """A layer of a family's that computes otherwise."""

    args, options = resolve("llama3", "debugmodel"), Options(emulate=True)
    with torch.device("meta"):
        model = Decoder(args)
        model.layers["1"].feed_forward.w2 = Own(args.ffn_dim, args.dim, bias=False)
    with pytest.raises(ConfigError, match=r"filter_fqns = \[\]\n  rule: layers.1.feed_forward.w2 is a Own"):
        apply_float8(copy.deepcopy(model), options)
    apply_float8(model, options.model_copy(update={"filter_fqns": ["layers.1.feed_forward.w2"]}))
    kinds = [type(it.feed_forward.w2) for it in model.layers.values()]
    assert kinds[:3] == [ShardedFloat8Linear, Own, ShardedFloat8Linear]


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_float8_has_torchaos_inductor_patch(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torchao applies in convert_to_float8_training alone. Without it Triton may give NaN."""
    from torch._inductor.codegen.triton import TritonOverrides
    from torchao.float8 import _inductor_patch

    for name in ("minimum", "maximum"):  # restores them afterwards
        monkeypatch.setattr(TritonOverrides, name, staticmethod(lambda a, b: "unpatched"))
    monkeypatch.setattr(_inductor_patch, "_PATCHED", False)
    model = {"converters": ["quantize.linear.float8"]}
    Converters(small_config("unused", model=model, compile={"enable": compiled}))
    for name in ("minimum", "maximum"):
        assert ("tl.where" in getattr(TritonOverrides, name)("a", "b")) == compiled


# On any mesh


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("float8"))


@pytest.fixture(scope="module")
def results(folder: str) -> dict[str, Result]:
    return run_all(folder, meshes.FLOAT8_FAST)


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return run_all(str(tmp_path_factory.mktemp("more_float8")), meshes.FLOAT8_MORE)


@pytest.mark.parametrize("layout", meshes.FLOAT8_FAST)
def test_layout_gives_the_gradients_of_one_process(results: dict[str, Result], layout: str) -> None:
    """To 1e-9, in fp64: a part with a scale of its own would differ by 1e-2."""
    assert problems(layout, results[layout]) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("layout", meshes.FLOAT8_MORE)
def test_every_layout_does(more_results: dict[str, Result], layout: str) -> None:
    assert problems(layout, more_results[layout]) == []


@pytest.mark.parametrize("layout", ["shard2 float8", "shard2 float8 gathered"])
def test_the_planner_knows_what_is_gathered(folder: str, results: dict[str, Result], layout: str) -> None:
    """In float8 a byte of each number; it leaves out the scales, of which each is a number."""
    for sent, rank in zip(results[layout]["sent"], planned(folder, layout), strict=True):
        expected = added_up(rank)
        assert sent["all_gather 0 1"] == expected["all_gather 0 1"]
        assert sent["reduce_scatter 0 1"] == expected["reduce_scatter 0 1"]


def test_a_byte_of_a_number_is_gathered(results: dict[str, Result]) -> None:
    whole, less = (results[f"shard2 float8{how}"]["sent"][0]["all_gather 0 1"] for how in ("", " gathered"))
    assert 0.2 * whole < less < 0.6 * whole  # of 8 in fp64; embedding and head stay as they are


def _scales(trainer: Trainer) -> tuple[list[float], list[float]]:
    """With which weights are cast that are gathered, and those of the weights as they are."""
    layers = [it for it in trainer.model_parts.models[0].modules() if isinstance(it, ShardedFloat8Linear)]
    parts: list[Any] = [local(layer.weight) for layer in layers]
    used = [part.fsdp_pre_all_gather(*[None] * 5)[1].item() for part in parts]
    return used, [amax_to_scale(tensor_to_amax(part), torch.float8_e4m3fn).item() for part in parts]


def _rolled_back(folder: str) -> list[tuple[list[float], list[float]]]:
    """The scales that are made ahead, before and after an earlier step's weights are loaded."""
    gathered = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
    trainer = small_trainer(
        small_config(
            f"{folder}/back",
            training={"steps": 2},
            model={"converters": ["float8"]},
            quantize={"linear": {"float8": gathered | {"emulate": True}}},
            checkpoint={"enable": True, "interval": 1},
        )
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
        found = [_scales(trainer)]
        assert trainer.checkpointer and trainer.checkpointer.roll_back() == 1
    return [*found, _scales(trainer)]


def _runs(folder: str) -> tuple[dict[str, list[float]], list[tuple[list[float], list[float]]]]:
    return _losses(folder), _rolled_back(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], list[Any]]:
    return run_world(_runs, 1, str(tmp_path_factory.mktemp("float8_runs")))[0]


def _losses(folder: str) -> dict[str, list[float]]:
    """Find the losses of runs in bf16, in float8 where a recipe is named."""
    found = {}
    for recipe in ("", *RECIPES):
        how = {"recipe_name": recipe or None, "emulate": bool(recipe)}
        tables: dict[str, Any] = {
            "training": {"mixed_precision_param": "bfloat16", "steps": 20},
            "model": {**few_tokens(folder), "converters": ["float8"] if recipe else []},
            "quantize": {"linear": {"float8": how}},
        }
        trainer = small_trainer(small_config(f"{folder}/{recipe or 'bf16'}", **tables))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        found[recipe] = [record["loss"] for record in trainer.history if "loss" in record]
    return found


def test_scales_made_ahead_are_not_those_of_weights_that_were_rolled_back(runs: tuple) -> None:
    _, [(before, newest), (after, earlier)] = runs
    assert before == newest and after == earlier and before != after


def test_the_loss_stays_near_that_of_bf16(runs: tuple) -> None:
    """To 0.02 after 20 steps; benchmarks/float8.py does 200 of the debug run."""
    found = dict(runs[0])
    exact = found.pop("")
    assert exact[-1] < exact[0] - 0.5  # it learns
    for losses in found.values():
        assert losses != exact
        assert abs(losses[-1] - exact[-1]) < 2e-2
