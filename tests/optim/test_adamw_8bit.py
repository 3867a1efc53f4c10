"""AdamW8bit is torch's AdamW whose moments are rounded after each step, on one process and on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.helpers import run_world
from tests.training import MESHES, small_config, small_trainer
from toolkit.checkpoint.manifest import step_folder
from toolkit.config import Config
from toolkit.config.optimizer import Optimizer
from toolkit.errors import CheckpointError
from toolkit.hardware import cached_tensors, simulate
from toolkit.models.from_config import model_args
from toolkit.optim import adamw_8bit
from toolkit.optim.optimizer import build_optimizer
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.optim.selection import BLOCK
from toolkit.parallel.dims import ParallelDims
from toolkit.planner.fake_step import step_memory
from toolkit.trainer import Trainer

OPTIONS: dict[str, Any] = {"lr": 1e-2, "eps": 1e-8, "weight_decay": 0.1}


def _optimizer(*parameters: nn.Parameter, name: str = "AdamW8bit", **options: Any) -> torch.optim.Optimizer:
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    return build_optimizer(named, Config(optimizer=Optimizer(**OPTIONS | options, name=name)))


def _gradient(like: Tensor, step: int) -> Tensor:
    """Rows of sizes that are far apart."""
    generator = torch.Generator().manual_seed(step)
    sizes = torch.logspace(-6, 0, len(like))[:, None] if like.ndim > 1 else 1.0
    return (torch.randn(like.shape, generator=generator) * sizes).to(like.dtype)


def _moment(state: Mapping[str, Tensor], name: str) -> Tensor:
    """A moment as numbers, straight from its definition."""
    codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
    values = adamw_8bit._map(name, scales.dtype, scales.device)[0]
    return values[codes.long()] * scales.repeat_interleave(256, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_step_is_torchs_from_the_moments_that_are_kept_which_are_then_rounded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, 512).to(dtype))
    optimizer, precise = _optimizer(parameter), torch.promote_types(dtype, torch.float32)
    for step in range(4):
        theirs = nn.Parameter(parameter.detach().to(precise))
        reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        parameter.grad = _gradient(parameter, step)
        theirs.grad = parameter.grad.to(precise)
        if step:
            state = optimizer.state[parameter]
            moments = {name: _moment(state, name) for name in ("exp_avg", "exp_avg_sq")}
            reference.state[theirs] = {**moments, "step": state["step"].clone()}
        optimizer.step()
        reference.step()
        atol = {torch.float64: 1e-14, torch.float32: 1e-6}.get(dtype, 0)
        torch.testing.assert_close(parameter.detach(), theirs.detach().to(dtype), rtol=1e-7, atol=atol)
        for name in ("exp_avg", "exp_avg_sq"):
            exact, state = reference.state[theirs][name], optimizer.state[parameter]
            blocks = exact.view(-1, 256).abs().amax(1, keepdim=True)
            values = adamw_8bit._map(name, precise, exact.device)[0]
            nearest = (exact.view(-1, 256, 1) / blocks[..., None] - values).abs().amin(-1)
            found = (exact - _moment(state, name)).abs().view(-1, 256) / blocks
            torch.testing.assert_close(found, nearest, rtol=0, atol=1e-6)


def test_the_256_values_are_the_librarys() -> None:
    maps = pytest.importorskip("bitsandbytes.functional")
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        values = adamw_8bit._map(name, torch.float32, torch.device("cpu"))[0]
        assert torch.equal(values, maps.create_dynamic_map(signed=signed))


def test_a_run_of_steps_is_torchaos() -> None:
    """But for the blocks whose squares are below 1e-12, which torchao rounds to nothing."""
    torchao = pytest.importorskip("torchao.optim")
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(40, 512))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer = _optimizer(ours)
    reference = torchao.AdamW8bit([theirs], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    torch.compiler.set_stance("force_eager")
    try:
        for step in range(5):
            ours.grad = torch.randn(40, 512, generator=torch.Generator().manual_seed(step))
            theirs.grad = ours.grad.clone()
            optimizer.step()
            reference.step()
    finally:
        torch.compiler.set_stance("default")
    # A moment half-way between two values may round to the other.
    assert ((ours - theirs).abs() > 1e-6).float().mean() < 1e-3


def test_what_has_no_whole_blocks_keeps_its_precision() -> None:
    """Vectors, rows of 300, and a matrix of 15 rows, which is too small."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(512,), (300, 300), (15, 256), (16, 256)]]
    optimizer, reference = _optimizer(*parameters), [nn.Parameter(it.detach().clone()) for it in parameters]
    theirs = _optimizer(*reference, name="AdamW", implementation="for-loop")
    for step in range(3):
        for mine, other in zip(parameters, reference, strict=True):
            mine.grad = _gradient(mine, step)
            other.grad = mine.grad.clone()
        optimizer.step()
        theirs.step()
    kinds = [sorted(optimizer.state[parameter]) for parameter in parameters]
    wide = ["exp_avg", "exp_avg_sq", "step"]
    assert kinds[:3] == [wide] * 3 and "exp_avg_codes" in kinds[3]
    for mine, other in zip(parameters[:3], reference, strict=False):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert not torch.equal(parameters[3], reference[3])


def test_a_dry_run_counts_the_chunks_of_a_gpu() -> None:
    weight = torch.empty(14336 * 4096 // BLOCK, BLOCK, device="meta")  # of an 8B: 896 chunks of a CPU
    with simulate("cuda"):
        assert len(list(adamw_8bit._chunks(weight))) == 4


def test_a_fake_step_leaves_no_table_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast can precede a run in its process: the tables of its fake tensors have arbitrary values."""
    make = adamw_8bit._map.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(adamw_8bit, "_map", cached_tensors(make))
    config = small_config(tmp_path, optimizer={"name": "AdamW8bit"}, model={"dim": 256, "vocab_size": 256})
    args, one = model_args(config, tokenizer_vocab=256), ParallelDims(1, 1, 1, 1, 1)
    step_memory(config, args, one, 0, param_dtype=torch.float32)
    arguments = "exp_avg", torch.float32, torch.device("cpu")
    for kept, fresh in zip(adamw_8bit._map(*arguments), make(*arguments), strict=True):
        assert torch.equal(kept, fresh)


def test_a_step_in_backward_is_the_step_after_it() -> None:
    models = []
    for early in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(512, 40)
        options = Optimizer(**OPTIONS, name="AdamW8bit", early_step_in_backward=early)
        optimizer = build_optimizer(model.named_parameters(), Config(optimizer=options))
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, 512)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight)


# On meshes

STEPS, SAVED = 4, 2


def _trainer(folder: Path, mesh: str, *, name: str = "AdamW8bit", **checkpoint: Any) -> Trainer:
    exact = {key: "float64" for key in ("dtype", "mixed_precision_param", "mixed_precision_reduce")}
    sizes = {"dim": 256, "n_heads": 8, "head_dim": 64, "ffn_dim": 512, "vocab_size": 4104}
    config = small_config(
        folder,
        model=sizes,
        training={"steps": STEPS, "seq_len": 16, "local_batch_size": 4, **exact},
        optimizer={"name": name},
        checkpoint={"enable": True, "interval": SAVED, **checkpoint},
        parallelism=MESHES[mesh],
    )
    return small_trainer(config)


def _state(trainer: Trainer) -> dict[str, Tensor]:
    tensors = optimizer_tensors(list(trainer.model_parts.named_parameters()), trainer.optimizer)
    return {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in tensors.items()}


def _whole(folder: Path, mesh: str) -> tuple[dict[int, float], dict[str, Tensor]]:
    """Losses of a run, and its state at the step that is saved."""
    trainer, saved = _trainer(folder, mesh), {}
    save = trainer.checkpointer.manager.save

    def watched(step: int, *args: Any) -> Path:
        saved[step] = _state(trainer)
        return save(step, *args)

    trainer.checkpointer.manager.save = watched  # type: ignore[method-assign]
    trainer.train()
    return {record["step"]: record["loss"] for record in trainer.history}, saved[SAVED]


def _world(folder: str) -> dict[str, Any]:
    base, found = Path(folder), {}
    path = str(step_folder(base / "fsdp" / "checkpoint", SAVED))
    begins = {"initial_load_path": path, "initial_load_model_only": False}
    losses, state = _whole(base / "fsdp", "fsdp")
    for mesh in MESHES:
        trainer = _trainer(base / f"fsdp to {mesh}", mesh, **begins)
        loaded = {name: torch.equal(tensor, state[name]) for name, tensor in _state(trainer).items()}
        trainer.train()
        found[mesh] = {
            "loaded": all(loaded.values()) and any(name.endswith("_codes") for name in loaded),
            "losses": {record["step"]: record["loss"] for record in trainer.history},
        }
    try:
        _trainer(base / "AdamW", "fsdp", name="AdamW", **begins).train()
    except CheckpointError as error:
        found["refused"] = str(error)
    return {"losses": losses, **found}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_world, 4, str(tmp_path_factory.mktemp("meshes")))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_checkpoint_goes_on_to_the_bit_on_its_mesh_and_to_rounding_on_others(
    world: list[dict[str, Any]], mesh: str
) -> None:
    for rank in world:
        rest = {step: loss for step, loss in rank["losses"].items() if step > SAVED}
        assert rank[mesh]["loaded"] and len(rest) == STEPS - SAVED
        expected = rest if mesh == "fsdp" else pytest.approx(rest, rel=1e-12)
        assert rank[mesh]["losses"] == expected


def test_the_state_of_another_optimizer_is_refused_by_name(world: list[dict[str, Any]]) -> None:
    assert all("exp_avg_codes" in rank["refused"] for rank in world)
