"""One training step: the optimizer's step in backward, and the one that is queued before the norm is known,
against the step after it, over meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.helpers import run_world
from tests.training import small_config, small_trainer, weights_digest
from toolkit.config import Config
from toolkit.config.job import Health
from toolkit.distributed.dtensor import local
from toolkit.errors import TrainingError
from toolkit.optim.optimizer_in_backward import StepInBackward
from toolkit.optim.optimizer_state import optimizer_tensors
from toolkit.parallel.guard import Guard
from toolkit.trainer import Trainer

STEPS = 3
TIED, UNTIED = {"name": "llama3.2"}, {"name": "llama3.1"}
HSDP = {"data_parallel_replicate_degree": 2}


def _config(folder: Path, *, early: bool, steps: int = STEPS, **tables: dict[str, Any]) -> Config:
    """Without clipping and accumulation, on one or two ranks; the rate is another at each step."""
    return small_config(
        folder,
        model=tables.get("model", UNTIED),
        parallelism=tables.get("parallelism", {}),
        training={"steps": steps, "max_norm": float("inf"), "local_batch_size": 16},
        optimizer={"early_step_in_backward": early, "no_decay": ["*norm.weight"]},
        lr_scheduler={"warmup_steps": 2, "total_steps": STEPS},
        checkpoint=tables.get("checkpoint", {}),
    )


def _result(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    state = optimizer_tensors(trainer.model_parts.models[0].named_parameters(), trainer.optimizer)
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}
    return {
        "losses": [record["loss"] for record in trainer.history],
        "norms": [record["grad_norm"] for record in trainer.history],
        "weights": weights_digest(trainer.model_parts.models[0]),
        "state": {name: tensor.numpy().tobytes() for name, tensor in local.items()},
        "updates": {tensor.item() for name, tensor in local.items() if name.endswith(".step")},
        "left": sum(parameter.grad is not None for parameter in trainer.model_parts.models[0].parameters()),
    }


def _pair(folder: Path, **tables: dict[str, Any]) -> dict[str, Any]:
    runs = {early: _config(folder / str(early), early=early, **tables) for early in (True, False)}
    return {("early" if early else "late"): _result(small_trainer(run)) for early, run in runs.items()}


def _changed_over(folder: Path) -> dict[str, Any]:
    """Two steps after backward, saved, then one in backward."""
    saving = {"checkpoint": {"enable": True, "interval": 2}}
    small_trainer(_config(folder, early=False, steps=2, **saving)).train()
    return _result(small_trainer(_config(folder, early=True, **saving)))


def _peak_bytes(folder: Path) -> dict[str, Any]:
    """Bytes of this rank's sharded gradients that exist at once in a step in backward, and of each unit."""
    trainer = small_trainer(_config(folder, early=True, steps=1))
    alive: dict[StorageWeakRef, int] = {}
    peak, update = 0, StepInBackward._update

    def watch(self: StepInBackward, parameter: nn.Parameter) -> None:
        nonlocal peak
        storage = parameter.grad._local_tensor.untyped_storage()  # type: ignore[union-attr]
        alive[StorageWeakRef(storage)] = storage.nbytes()
        del storage
        peak = max(peak, sum(size for reference, size in alive.items() if not reference.expired()))
        update(self, parameter)

    for parameter in trainer.model_parts.models[0].parameters():
        parameter._post_accumulate_grad_hooks.clear()
        parameter.register_post_accumulate_grad_hook(watch.__get__(trainer.optimizer))
    trainer.train()
    sizes = {name: p.to_local().nbytes for name, p in trainer.model_parts.models[0].named_parameters()}
    head = sizes["norm.weight"] + sizes["output.weight"]
    return {"peak": peak, "largest": max(head, sizes["tok_embeddings.weight"]), "all": sum(sizes.values())}


def _break(folder: Path) -> str:
    """Put an infinity where only the last rank's part of the gradient shows it."""
    trainer = small_trainer(_config(folder, early=True))
    for group in trainer.optimizer.param_groups:
        del group["param_names"]  # which a user's optimizer need not have
    parameter = _poison(trainer)
    parameter._post_accumulate_grad_hooks.move_to_end(next(iter(parameter._post_accumulate_grad_hooks)))
    with pytest.raises(TrainingError) as error:
        trainer.train()
    return str(error.value)


def _poison(trainer: Trainer) -> Any:
    parameter = trainer.model_parts.models[0].get_parameter("layers.1.feed_forward.w2.weight")

    def poison(parameter: nn.Parameter) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            parameter.grad._local_tensor[0, 0] = torch.inf  # type: ignore[union-attr]

    parameter.register_post_accumulate_grad_hook(poison)
    return parameter


def _stepped(folder: Path, *, ahead: bool, max_norm: float) -> tuple[Trainer, dict[str, Tensor]]:
    """A trainer after two steps, and this rank's part of its weights and of its optimizer's state."""
    config = small_config(folder, training={"max_norm": max_norm})
    trainer = small_trainer(config)
    trainer.train_step.updates_ahead = ahead
    batches = iter(trainer.loader)
    for _ in range(2):
        trainer.train_step([next(batches) for _ in range(trainer.batch.accumulation)], learning_rate=1e-2)
    return trainer, _tensors(trainer)


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    named = dict(trainer.model_parts.named_parameters())
    state = optimizer_tensors(named.items(), trainer.optimizer)
    return {name: local(x).detach().clone() for name, x in {**named, **state}.items()}


def _ahead(folder: Path) -> dict[str, Any]:
    """How far an update that is queued early is from the one after the wait, clipped and not; and what is
    left of a broken one."""
    far = {}
    for max_norm in (0.1, float("inf")):
        trainer, early = _stepped(folder / f"{max_norm} early", ahead=True, max_norm=max_norm)
        _, late = _stepped(folder / f"{max_norm} late", ahead=False, max_norm=max_norm)
        assert early.keys() == late.keys()
        far[max_norm] = max((x - late[name]).abs().max().item() for name, x in early.items() if x.numel())
    batches = iter(trainer.loader)
    memory = {"losses": [1.0, 1.0], "norms": [1e9, 1e9]}
    guard = Guard(Health(loss_spike_policy="skip", loss_spike_window=2), lambda: memory)
    trainer.train_step.guard, trainer.train_step.limits = guard, guard.limits()
    trainer.train_step([next(batches) for _ in range(trainer.batch.accumulation)], learning_rate=1e-2)
    assert guard.rejected and "is above 1, " in guard.rejected.reason
    assert all(torch.equal(x, early[name]) for name, x in _tensors(trainer).items()), "a spike was trained on"
    trainer.train_step.guard = None
    _poison(trainer)
    with pytest.raises(TrainingError) as error:
        trainer.train_step([next(batches) for _ in range(trainer.batch.accumulation)], learning_rate=1e-2)
    kept = all(torch.equal(x, early[name]) for name, x in _tensors(trainer).items())
    return {"far": far, "error": str(error.value), "kept": kept}


def _one(folder: str) -> dict[str, Any]:
    return {"tied": _pair(Path(folder, "tied"), model=TIED), "ahead": _ahead(Path(folder, "ahead"))}


def _two(folder: str) -> dict[str, Any]:
    return {
        "sharded": _pair(Path(folder, "sharded")),
        "tied": _pair(Path(folder, "tied"), model=TIED),
        "replicated": _pair(Path(folder, "replicated"), model=TIED, parallelism=HSDP),
        "changed": _changed_over(Path(folder, "changed")),
        "peak": _peak_bytes(Path(folder, "peak")),
        "broken": _break(Path(folder, "broken")),
        "ahead": _ahead(Path(folder, "ahead")),
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_one, 1, str(tmp_path_factory.mktemp("one")))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_world(_two, 2, str(tmp_path_factory.mktemp("two")))


@pytest.mark.parametrize(
    ("world", "layout"), [("one", "tied"), ("two", "sharded"), ("two", "tied"), ("two", "replicated")]
)
def test_a_step_in_backward_is_the_step_after_it(
    world: str, layout: str, request: pytest.FixtureRequest
) -> None:
    for result in request.getfixturevalue(world):
        early, late = result[layout]["early"], result[layout]["late"]
        # Updates are of single elements, in whatever groups of tensors: the same bits.
        assert early["losses"] == late["losses"] and early["weights"] == late["weights"]
        assert early["state"] == late["state"]
        # fp64 squares, added up parameter by parameter instead of all at once
        assert early["norms"] == pytest.approx(late["norms"], rel=1e-14)
        # Also a tied embedding, whose gradient has two sources, is updated once a step.
        assert early["updates"] == {STEPS}
        assert early["left"] == 0


def test_a_checkpoint_is_the_same_with_either(two: list[dict[str, Any]]) -> None:
    for result in two:
        changed, straight = result["changed"], result["sharded"]["late"]
        assert changed["losses"] == straight["losses"][2:]
        assert changed["weights"] == straight["weights"] and changed["state"] == straight["state"]


def test_gradients_of_one_unit_exist_at_a_time(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert result["peak"]["peak"] == result["peak"]["largest"] < 0.6 * result["peak"]["all"]


def test_a_broken_gradient_is_named_and_the_update_admitted(two: list[dict[str, Any]]) -> None:
    for result in two:
        assert "rank 1: layers.1.feed_forward.w2.weight" in result["broken"]
        assert "the parameters were already updated by this step" in result["broken"]
        assert "were not updated" not in result["broken"]


@pytest.mark.parametrize("world", ["one", "two"])
def test_an_update_that_is_queued_early_is_the_one_after_the_wait(
    world: str, request: pytest.FixtureRequest
) -> None:
    for result in request.getfixturevalue(world):
        far = result["ahead"]["far"]
        # Without clipping the same bits; with it gradients are divided by fp32, not multiplied by fp64, which
        # is 1e-7 of each: of an update as large as the learning rate, 1e-2, 1e-9, then rounded in the weight.
        assert far[float("inf")] == 0.0 <= far[0.1] < 5e-7


@pytest.mark.parametrize("world", ["one", "two"])
def test_an_update_of_a_broken_gradient_that_is_queued_already_does_nothing(
    world: str, request: pytest.FixtureRequest
) -> None:
    results = request.getfixturevalue(world)
    for result in results:
        assert result["ahead"]["kept"]
        assert f"rank {len(results) - 1}: layers.1.feed_forward.w2.weight" in result["ahead"]["error"]
        assert "the parameters were not updated by this step" in result["ahead"]["error"]
