"""Runs whose sequence length, batch and mixture change: their samples, their curve on any mesh, their
resumption, and their end."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import run_world
from tests.training import MESHES as OF_TWO
from tests.training import small_config
from toolkit.compat import tomllib
from toolkit.config import Config
from toolkit.config.phases import run_phases
from toolkit.data.batch_size import BatchShape
from toolkit.data.build import open_data
from toolkit.data.build_loader import training_loader
from toolkit.data.dataloader import Loader
from toolkit.data.run_data import RunData
from toolkit.errors import EXIT_FINISHED, EXIT_REQUEUE, DataError
from toolkit.health.watch import health_hooks
from toolkit.metrics.startup_timer import StartupTimer
from toolkit.run_phases import train_in_phases
from toolkit.step_hooks import StepHook, StepResult
from toolkit.trainer import Trainer

STEPS = 9
PHASES: dict[str, Any] = {
    "anneal": {"start_step": 3, "weights": {"other": 1.0}, "global_batch_size": 6},
    "long": {"start_step": 6, "seq_len": 128, "local_batch_size": 1, "rope_theta": 1e6},
}


def _config(folder: str | Path, parallelism: dict[str, Any] | None = None, **tables: Any) -> Config:
    text = Path(folder).parent / "text.jsonl"
    if not text.exists():
        lines = (json.dumps({"text": f"{n} times {n} is {n * n}"}) for n in range(300))
        text.write_text("\n".join(lines))
    sizes = {"steps": STEPS, "seq_len": 64, "global_batch_size": 12, "local_batch_size": 2}
    precision = dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), "float64")
    mixture = {
        "text": {"dataset_path": str(text)},
        "other": {"dataset": "embedded_validation", "weight": 0.0},
    }
    return small_config(
        folder,
        training={"dataset": "c4_test", **sizes, **precision, **tables.pop("training", {})},
        data={"mixture": mixture},
        phases=PHASES,
        parallelism=parallelism or {},
        checkpoint={"enable": True, "interval": 2, **tables.pop("checkpoint", {})},
        **tables,
    )


# The samples


def _samples(loader: Loader, steps: int, *, seq_len: int) -> list[bytes]:
    batches, rows = iter(loader), []
    for _ in range(steps * loader._micro_batches):
        rows += [row[:seq_len].numpy().tobytes() for row in next(batches)["tokens"]]
    return rows


def _loader(config: Config, data: RunData, number: int, state: dict[str, Any] | None = None) -> Loader:
    phase = run_phases(config)[number]
    training = phase.config.training
    total, local = training.global_batch_size, training.local_batch_size
    loader = training_loader(
        phase.config, data, BatchShape(total, local, total // local), dp_rank=0, dp_size=1, seed=5,
        previous=phase.previous,
    )  # fmt: skip
    if state:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def test_each_corpus_continues_where_the_phase_before_ended(tmp_path: Path) -> None:
    config = _config(tmp_path / "run")
    data = open_data(config, progress=False)
    first, drawn = _loader(config, data, 0), {}
    rows = [_samples(first, 3, seq_len=64)]
    states = [first.state_dict()]
    for number in (1, 2):
        loader = _loader(config, data, number, states[-1])
        rows.append(_samples(loader, 3, seq_len=64))
        states.append(loader.state_dict())
        drawn[number] = {name: n for name, (n, _) in loader.state_dict()["drawn"].items()}
    [(name, (n, length))] = states[0]["drawn"].items()
    assert (name, n) == ("text", 36) and length > 54
    assert sum(drawn[1].values()) == 36 + 18 and drawn[1]["other"] > 0 and drawn[1]["text"] > 36
    assert len({*rows[0], *rows[1]}) == 54, "no row of the same length is drawn twice"
    long = states[2]["drawn"]["text"][1]
    assert long < length
    assert states[2]["first"]["text"] == math.ceil(drawn[1]["text"] / length * long)
    # A position within a phase is an ordinary one.
    again = _loader(
        config, data, 1, states[0] | _loader(config, data, 1, states[0]).state_dict() | {"samples": 6}
    )
    assert _samples(again, 2, seq_len=64) == rows[1][6:]


def test_positions_of_other_phases_and_corpora_are_rejected(tmp_path: Path) -> None:
    config = _config(tmp_path / "run")
    data = open_data(config, progress=False)
    state = _loader(config, data, 0).state_dict()
    with pytest.raises(DataError, match="phase was '' and is 'long'"):
        _loader(config, data, 2, state)
    with pytest.raises(DataError, match="text.corpus was 'x'"):
        _loader(config, data, 1, state | {"text.corpus": "x"})


def test_a_phase_of_another_batch_draws_the_same_samples(tmp_path: Path) -> None:
    config = _config(tmp_path / "run")
    phases = {"small": {"start_step": 2, "global_batch_size": 4}}
    config = config.model_validate(config.model_dump() | {"phases": phases})
    data = open_data(config, progress=False)
    whole = _samples(_loader(config, data, 0), 5, seq_len=64)
    first = _loader(config, data, 0)
    rows = _samples(first, 2, seq_len=64)
    rows += _samples(_loader(config, data, 1, first.state_dict()), 9, seq_len=64)
    assert rows == whole


# Runs


class _Crash(StepHook):
    def __init__(self, at: int):
        self.at = at

    def after_step(self, step: int, result: StepResult) -> None:
        if step == self.at:
            raise RuntimeError("crash")


class _Terminate(StepHook):
    """Sends SIGTERM to this process while the checkpoint of a step is saved."""

    def __init__(self, at: int, trainer: Trainer):
        self.at, self.trainer = at, trainer

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        if name == "checkpoint" and self.trainer.train_state.step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        yield


def _train(
    folder: Path,
    parallelism: dict[str, Any] | None = None,
    *hooks: Callable[[Trainer], StepHook],
    **tables: Any,
) -> Any:
    """Return the exit code, what each step logged and what was printed."""
    config = _config(folder, parallelism, **tables)
    data, alive = open_data(config, progress=False), list[weakref.ref[Any]]()

    def build(**options: Any) -> Trainer:
        assert not [it for it in alive if it() is not None], "an ended phase takes memory"
        trainer = Trainer(config, data, torch.device("cpu"), StartupTimer(enabled=False), **options)
        trainer.hooks += [*health_hooks(trainer), *(hook(trainer) for hook in hooks)]
        alive.extend(map(weakref.ref, (trainer.model_parts.models[0], trainer.optimizer, trainer.loader)))
        files = trainer.file_group._get_backend(torch.device("cpu")).options._timeout
        assert files.total_seconds() == config.comm.save_timeout_seconds
        return trainer

    with contextlib.redirect_stdout(io.StringIO()) as said:
        code, trainer = train_in_phases(config, build)
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    return code, [[record[key] for key in keys] for record in trainer.history], said.getvalue()


def _on_one_rank(folder: str) -> None:
    root = Path(folder)
    runs = {"whole": _train(root / "whole")}
    branch = {
        "initial_load_path": str(root / "whole" / "checkpoint" / "step-6"),
        "initial_load_model_only": False,
    }
    runs["branch"] = _train(root / "branch", checkpoint=branch)
    runs["seed"] = _train(root / "seed", checkpoint={"create_seed_checkpoint": True})
    runs["step 0"] = _train(
        root / "step 0", checkpoint=branch | {"exclude_from_loading": ["train_state", "dataloader"]}
    )
    runs["terminated"] = _train(root / "terminated", None, partial(_Terminate, 6))
    workers = {"dataloader": {"num_workers": 1}}
    runs["workers"] = _train(root / "workers", training=workers)
    (root / "one.json").write_text(json.dumps(runs))


MESHES: dict[str, dict[str, Any]] = {
    "tp": OF_TWO["tp"],
    "cp": {"context_parallel_degree": 2},
    "pp": OF_TWO["pp"] | {"pipeline_parallel_microbatch_size": 1},
}
CRASHES = (5, 6)


def _on_two_ranks(folder: str) -> None:
    root, runs = Path(folder), dict[str, Any]()
    for name, parallelism in MESHES.items():
        runs[name] = _train(root / name, parallelism)
    for step in CRASHES:
        with pytest.raises(RuntimeError, match="crash"):
            _train(root / f"crash {step}", {}, lambda trainer, step=step: _Crash(step))
        runs[f"crash {step}"] = _train(root / f"crash {step}")
    if torch.distributed.get_rank() == 0:
        (root / "two.json").write_text(json.dumps(runs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder: Path) -> Any:
    run_world(_on_one_rank, 1, str(folder), timeout=300)
    return json.loads((folder / "one.json").read_text())


@pytest.fixture(scope="module")
def two(folder: Path, one: Any) -> Any:
    run_world(_on_two_ranks, 2, str(folder), timeout=300)
    return json.loads((folder / "two.json").read_text())


def test_one_run_with_one_schedule(folder: Path, one: Any) -> None:
    code, history, said = one["whole"]
    assert code == EXIT_FINISHED
    steps, _, _, rates, tokens = map(np.array, zip(*history, strict=True))
    assert steps.tolist() == list(range(1, STEPS + 1))
    assert np.all(np.diff(rates[5:]) < 0), "one schedule over all phases"
    sizes = np.diff(tokens, prepend=0)
    assert sizes[:3].min() > 11 * 60 and sizes[3:6].max() <= 6 * 64 < sizes[6:].min() <= 12 * 128
    assert "phase anneal: 6 samples of 64 tokens to step 6" in said
    assert {it.name for it in (folder / "whole" / "checkpoint").iterdir()} >= {"step-6", "step-9"}
    logged = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [it["step"] for it in logged if "loss" in it] == steps.tolist()


@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_curve_on_any_mesh(one: Any, two: Any, mesh: str) -> None:
    np.testing.assert_allclose(two[mesh][1], one["whole"][1], rtol=1e-9)


@pytest.mark.parametrize("crash", CRASHES)
def test_a_run_resumes_in_or_between_phases(one: Any, two: Any, crash: int) -> None:
    code, history, _ = two[f"crash {crash}"]
    assert code == EXIT_FINISHED and len(history) >= STEPS - crash
    np.testing.assert_allclose(history, one["whole"][1][-len(history) :], rtol=1e-9)


def test_a_run_branches_off_before_a_phase(one: Any) -> None:
    assert one["branch"][1] == one["whole"][1][6:]


def test_a_run_that_counts_its_steps_anew_begins_with_the_first_phase(one: Any) -> None:
    _, history, _ = one["step 0"]
    assert [step for step, *_ in history] == list(range(1, STEPS + 1))
    assert history[0][-1] > 11 * 60, "tokens of a batch of the first phase"


def test_a_request_to_stop_at_the_end_of_a_phase_is_kept(one: Any) -> None:
    code, history, said = one["terminated"]
    assert code == EXIT_REQUEUE and history == one["whole"][1][:7]
    assert "saved step 7 and stopped by SIGTERM" in said


def test_workers_end_with_their_phase(one: Any) -> None:
    assert one["workers"][:2] == one["whole"][:2]


def test_the_folder_has_the_config_of_the_whole_run(folder: Path, one: Any) -> None:
    written = tomllib.loads((folder / "whole" / "config.toml").read_text())
    assert written["training"]["seq_len"] == 64 and written["phases"]["long"]["seq_len"] == 128


def test_a_seed_checkpoint_ends(one: Any) -> None:
    code, history, said = one["seed"]
    assert code == EXIT_FINISHED and history == [] and "saved the initial weights" in said
