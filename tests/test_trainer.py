"""The trainer as a whole: resuming, stopping, failing, validating."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from tests.training import small_config, small_trainer, weights_digest
from toolkit.checkpoint.manifest import committed_steps
from toolkit.config import Config
from toolkit.errors import EXIT_FINISHED, EXIT_REQUEUE, ConfigError, OutOfMemory, TrainingError
from toolkit.trainer import Trainer
from toolkit.validate import validate

STEPS = 8


def _config(folder: Path, *, steps: int = STEPS, **tables: dict[str, Any]) -> Config:
    tables["training"] = {"steps": steps, **tables.get("training", {})}
    # the schedule of the whole run, however far one start of it goes
    tables["lr_scheduler"] = {"warmup_steps": 2, "total_steps": STEPS}
    checkpoint = {"enable": True, "interval": 4, **tables.pop("checkpoint", {})}
    return small_config(folder, checkpoint=checkpoint, **tables)


def _run(config: Config) -> dict[str, Any]:
    trainer = small_trainer(config)
    code = trainer.train()
    return {
        "code": code,
        "losses": {record["step"]: record["loss"] for record in trainer.history if "loss" in record},
        "rates": {record["step"]: record["lr"] for record in trainer.history if "lr" in record},
        "tokens": trainer.train_state.tokens,
        "weights": weights_digest(trainer.model_parts.models[0]),
    }


def _whole_and_halves(folder: str) -> dict[str, Any]:
    """One run of eight steps, and one of four that is resumed; on another batch cut, too."""
    whole = _run(_config(Path(folder, "whole")))
    first = _run(_config(Path(folder, "halves"), steps=4))
    exports = Path(folder, "halves", "hf")
    for left in ("step-2.replaced-0a", "step-4.tmp-0b"):  # by exports that were killed
        (exports / left).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    second = _run(_config(Path(folder, "halves")))
    again = _run(_config(Path(folder, "halves")))
    exported = sorted(path.name for path in exports.iterdir())
    return {"whole": whole, "first": first, "second": second, "again": again, "exported": exported}


def _second_half(folder: str) -> dict[str, Any]:
    return _run(_config(Path(folder, "halves"), training={"local_batch_size": 4}))


def _first_half(folder: str) -> dict[str, Any]:
    return _run(_config(Path(folder, "halves"), steps=4))


def _stop(folder: str) -> dict[str, Any]:
    """Signal the last rank alone, in its third step."""
    trainer = small_trainer(_config(Path(folder, "stopped")))
    step = trainer.train_step
    calls = []

    def signalled(*args: Any, **keywords: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args, **keywords)

    trainer.train_step = signalled  # type: ignore[assignment]
    code = trainer.train()
    return {"code": code, "step": trainer.train_state.step, "latest": trainer.checkpointer.manager.latest()}


def _break(folder: str) -> dict[str, Any]:
    """Put an infinity where only the last rank's part of the gradient shows it."""
    trainer = small_trainer(_config(Path(folder, "broken")))
    before = weights_digest(trainer.model_parts.models[0])
    name = "layers.1.feed_forward.w2.weight"

    def poison(parameter: torch.nn.Parameter) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            parameter.grad._local_tensor[0, 0] = torch.inf  # type: ignore[union-attr]

    dict(trainer.model_parts.named_parameters())[name].register_post_accumulate_grad_hook(poison)
    try:
        trainer.train()
    except TrainingError as error:
        return {"message": str(error), "unchanged": weights_digest(trainer.model_parts.models[0]) == before}
    return {"message": "", "unchanged": False}


def _start_from_weights(folder: str) -> dict[str, Any]:
    """A new run from the weights of a finished one, named as a user names a path."""
    os.environ["HOME"] = folder
    path = f"~/whole/checkpoint/step-{STEPS}"
    trainer = small_trainer(
        small_config(Path(folder, "child"), checkpoint={"enable": True, "initial_load_path": path})
    )
    return {"step": trainer.train_state.step, "weights": weights_digest(trainer.model_parts.models[0])}


def _two_runs_in_one_folder(folder: str) -> list[str]:
    """Messages to the second: of the whole folder, and of the checkpoints alone, by another way there."""
    first = small_trainer(_config(Path(folder, "shared")))
    checkpoints = f"{folder}/other/../shared/checkpoint"
    said = []
    for config in (
        _config(Path(folder, "shared")),
        _config(Path(folder, "other"), checkpoint={"folder": checkpoints}),
        _config(Path(folder, "reader"), checkpoint={"folder": checkpoints, "load_only": True}),
    ):
        try:
            small_trainer(config)
            said.append("")
        except ConfigError as error:
            said.append(str(error))
    assert first is not None
    return said


def _losses_on_the_same_data(folder: str) -> tuple[float, float]:
    """Return validation's loss of one global batch, and that of the next training step on the same."""
    trainer: Trainer = small_trainer(_config(Path(folder, "same")))
    batches = [batch for batch, _ in zip(trainer.loader, range(trainer.batch.accumulation), strict=False)]
    found = validate(trainer.model_parts, batches, device=trainer.device, limit=None)
    assert found is not None
    return found["loss"], trainer.train_step(batches, learning_rate=1e-3).loss


def _in_background(folder: str) -> dict[str, Any]:
    """Two halves whose checkpoints are written while training goes on."""
    saving = {"interval": 1, "async_mode": "async"}
    _run(_config(Path(folder, "background"), steps=4, checkpoint=saving))
    return _run(_config(Path(folder, "background"), checkpoint=saving))


def _parts_left_out(folder: str) -> dict[str, Any]:
    """Learning rates of runs that go on after the fourth step of the whole one, and from what they save."""
    source = {
        "initial_load_path": str(Path(folder, "whole", "checkpoint", "step-4")),
        "initial_load_model_only": False,
    }
    anew, counted = Path(folder, "anew"), Path(folder, "counted")
    first = source | {"exclude_from_loading": ["lr_scheduler"]}
    second = source | {"exclude_from_loading": ["train_state", "dataloader", "optimizer"]}
    rates = {
        "schedule": _run(_config(anew, steps=6, checkpoint=first))["rates"],
        "schedule, resumed": _run(_config(anew, checkpoint=first))["rates"],
        "step": _run(_config(counted, steps=2, checkpoint=second))["rates"],
    }
    resumed = small_trainer(_config(counted, steps=2, checkpoint=second))
    tensors = resumed.checkpointer.tensors(model_only=False)
    updates = {float(tensor) for name, tensor in tensors.items() if name.endswith(".step")}
    found = (resumed.train_state.step, resumed.loader.samples // resumed.batch.total, updates)
    return rates | {"step, resumed": found}


def _from_seed(folder: str) -> tuple[int, list[int], dict[str, Any]]:
    """A run that saves its initial weights and ends, and the run that goes on from them."""
    seeding = small_trainer(_config(Path(folder, "seeded"), checkpoint={"create_seed_checkpoint": True}))
    code, there = seeding.train(), committed_steps(Path(folder, "seeded", "checkpoint"))
    return code, there, _run(_config(Path(folder, "seeded")))


def _from_converted_weights(folder: str) -> dict[str, Any]:
    """A run that goes on from a checkpoint with what a conversion writes."""
    saved = small_trainer(_config(Path(folder, "converted"))).checkpointer
    step = saved.manager.save(0, saved.tensors(model_only=True), {"model_only": True})
    left_out = ["optimizer", "dataloader"]
    options = {
        "initial_load_path": str(step), "initial_load_model_only": False, "exclude_from_loading": left_out
    }  # fmt: skip
    return _run(_config(Path(folder, "of converted"), checkpoint=options))


def _out_of_time(folder: str, **checkpoint: Any) -> dict[str, Any]:
    trainer = small_trainer(_config(Path(folder, "late"), job={"time_limit": 1e-6}, checkpoint=checkpoint))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = trainer.train()
    return {
        "said": said.getvalue().splitlines()[-1:],
        "code": code,
        "step": trainer.train_state.step,
        "latest": trainer.checkpointer.manager.latest(),
        "there": committed_steps(trainer.checkpointer.manager.folder),
    }


def _slow_start(folder: str) -> int:
    """A run of an hour that takes 40 minutes to begin."""
    trainer = small_trainer(_config(Path(folder, "slow"), steps=3, job={"time_limit": 60}))
    trainer.shared.deadline._last -= 2400
    trainer.shared.deadline._end -= 2400
    trainer.train()
    return trainer.train_state.step


def _stopped_while_compiling(folder: str) -> tuple[int, list[int], int]:
    """A signal to one rank at the first thing that is compiled."""
    from torch._dynamo.callback import callback_handler

    compiled = 0

    def begins(*_: Any) -> None:
        nonlocal compiled
        compiled += 1
        if compiled == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    callback_handler.register_start_callback(begins)
    config = _config(Path(folder) / "compiled", compile={"enable": True, "backend": "aot_eager"})
    code = small_trainer(config).train()
    callback_handler.remove_start_callback(begins)
    return code, committed_steps(Path(folder) / "compiled" / "checkpoint"), compiled


def _at_home(folder: str) -> tuple[str, str]:
    """The last words of a run with curves in the home folder, and of one without memory in a used folder."""
    with contextlib.redirect_stdout(io.StringIO()) as said, mock.patch.dict(os.environ, HOME=folder):
        metrics = {"enable_tensorboard": True, "save_tb_folder": "~/tb"}
        small_trainer(_config(Path(folder, "curves"), steps=1, metrics=metrics)).train()
        config = _config(Path(folder, "full"), steps=1)
        earlier = Path(folder, "full", config.profiling.save_memory_snapshot_folder, "iteration_1_exit")
        earlier.mkdir(parents=True, exist_ok=True)
        (earlier / "rank0_memory_snapshot.pickle").touch()
        trainer = small_trainer(config)
        trainer.train_step = mock.Mock(side_effect=torch.OutOfMemoryError)
        with pytest.raises(OutOfMemory) as error:
            trainer.train()
    return said.getvalue(), str(error.value)


def _everything(folder: str) -> dict[str, Any]:
    return {
        "resume": _whole_and_halves(folder),
        "stop": _stop(folder),
        "break": _break(folder),
        "same": _losses_on_the_same_data(folder),
        "child": _start_from_weights(folder),
        "left out": _parts_left_out(folder),
        "shared": _two_runs_in_one_folder(folder),
        "background": _in_background(folder),
        "seed": _from_seed(folder),
        "converted": _from_converted_weights(folder),
        "late": _out_of_time(folder),
        "late, rewound": _out_of_time(folder, load_step=1, keep_latest_k=1),
        "slow start": _slow_start(folder),
        "home": _at_home(folder),
        "compiling": _stopped_while_compiling(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def results(folder: str) -> list[dict[str, Any]]:
    return run_world(_everything, 2, folder)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(results: list[dict[str, Any]]) -> None:
    for runs in (result["resume"] for result in results):
        whole, first, second = runs["whole"], runs["first"], runs["second"]
        assert list(first["losses"]) == [1, 2, 3, 4] and list(second["losses"]) == [5, 6, 7, 8]
        assert first["losses"] | second["losses"] == whole["losses"]
        assert second["weights"] == whole["weights"]
        assert second["tokens"] == whole["tokens"]


def test_a_start_clears_what_killed_exports_left(results: list[dict[str, Any]]) -> None:
    assert [result["resume"]["exported"] for result in results] == [["step-2"]] * 2


def test_a_finished_run_says_so_and_changes_nothing(results: list[dict[str, Any]]) -> None:
    again = results[0]["resume"]["again"]
    assert again["code"] == EXIT_FINISHED and not again["losses"]
    assert again["weights"] == results[0]["resume"]["whole"]["weights"]


def test_another_mesh_goes_on_with_the_same_curve(results: list[dict[str, Any]], tmp_path: Path) -> None:
    (first,) = run_world(_first_half, 1, str(tmp_path))
    resumed = run_world(_second_half, 4, str(tmp_path))
    whole = results[0]["resume"]["whole"]
    # fp32 sums in another order: eight steps apart, a few units in the seventh digit
    assert first["losses"] | resumed[0]["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert resumed[0]["tokens"] == whole["tokens"]


def test_a_signal_to_one_rank_saves_and_stops_them_all(results: list[dict[str, Any]]) -> None:
    assert [result["stop"] for result in results] == [{"code": EXIT_REQUEUE, "step": 3, "latest": 3}] * 2


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_update(results: list[dict[str, Any]]) -> None:
    for broken in (result["break"] for result in results):
        assert (
            broken["message"].startswith("step 1: ")
            and "rank 1: layers.1.feed_forward.w2.weight" in broken["message"]
        )
        assert broken["unchanged"]


def test_a_new_run_starts_from_another_runs_weights(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["child"] == {"step": 0, "weights": result["resume"]["whole"]["weights"]}


def test_a_schedule_that_is_left_out_starts_again_and_one_that_is_not_goes_on(
    results: list[dict[str, Any]],
) -> None:
    for result in results:
        rates, left_out = result["resume"]["whole"]["rates"], result["left out"]
        assert left_out["schedule"] == {5: rates[1], 6: rates[2]}
        assert left_out["schedule, resumed"] == {7: rates[3], 8: rates[4]}  # from its own checkpoint
        assert left_out["step"] == {1: rates[5], 2: rates[6]}
        assert left_out["step, resumed"] == (2, 2, {2.0})


def test_a_folder_that_another_run_writes_to_is_refused_on_every_rank(results: list[dict[str, Any]]) -> None:
    for result in results:
        run, checkpoints, only_read = result["shared"]
        assert "job.dump_folder = " in run and "is writing there" in run
        assert "checkpoint.folder = " in checkpoints and "is writing there" in checkpoints
        assert not only_read


def test_validation_is_the_loss_of_training(results: list[dict[str, Any]]) -> None:
    validation, training = results[0]["same"]
    assert validation == pytest.approx(training, rel=1e-6)


def test_a_run_that_saves_in_the_background_is_the_same_run(results: list[dict[str, Any]]) -> None:
    for result in results:
        whole, background = result["resume"]["whole"], result["background"]
        assert background["weights"] == whole["weights"]
        assert background["losses"] == {step: whole["losses"][step] for step in range(5, STEPS + 1)}


def test_a_seed_checkpoint_is_where_a_run_begins(results: list[dict[str, Any]]) -> None:
    for result in results:
        code, steps, run = result["seed"]
        assert (code, steps) == (0, [0])
        assert run == result["resume"]["whole"]


def test_a_run_goes_on_from_converted_weights(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["converted"] == result["resume"]["whole"]


def test_a_run_out_of_time_saves_and_stops(results: list[dict[str, Any]]) -> None:
    for result in results:
        late = result["late"]
        assert (late["code"], late["step"], late["latest"]) == (EXIT_REQUEUE, 1, 1)
    assert results[0]["late, rewound"]["there"] == [1, 2]  # 1 is where the same command starts again
    [said], [rewound] = results[0]["late"]["said"], results[0]["late, rewound"]["said"]
    assert said.endswith("; the same command resumes from it")
    assert "; to continue: --checkpoint.load_step 2; the same command returns to step 1" in rewound


def test_a_start_that_takes_long_is_no_slow_step(results: list[dict[str, Any]]) -> None:
    assert [result["slow start"] for result in results] == [3, 3]


def test_the_folders_that_are_told_are_those_of_the_run(results: list[dict[str, Any]], folder: str) -> None:
    said, full = results[0]["home"]
    assert f"--logdir {folder}/tb\n" in said and Path(folder, "tb").is_dir()
    assert full.startswith("step 1: out of memory on cpu") and "iteration_1_exit" not in full


def test_a_signal_while_the_model_is_compiled_saves_and_stops(results: list[dict[str, Any]]) -> None:
    for code, steps, compiled in (result["compiling"] for result in results):
        assert compiled > 0
        # The first step was under way, and the second is where the ranks agree.
        assert (code, steps) == (EXIT_REQUEUE, [2])
