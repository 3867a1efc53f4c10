"""A rank that is slow is named, by what it does itself and not by what it waits for; and a heartbeat."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit.distributed import process_group
from toolkit.health.heartbeat import Heartbeat
from toolkit.health.stragglers import DeviceWaits, Stragglers
from toolkit.metrics.jsonl import rank_files
from toolkit.parallel import autograd_collectives, ring_attention
from toolkit.parallel.sequence_shards import SequenceShards
from toolkit.parallel.vocabulary_parallel import vocabulary_parallel_losses
from toolkit.step_hooks import StepResult

RESULT = StepResult(loss=1.0, grad_norm=1.0, tokens=1, stop=False)
DELAY = 0.8  # seconds of a slow rank beside next to none of the others, on a machine that has other work


def _waits_of(kind: str) -> Callable[[], None]:
    """The exchange with which a step of two ranks ends."""
    tensor, rank = torch.ones(8), dist.get_rank()

    def transfers() -> None:
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        back = dist.irecv(tensor, 1) if rank == 0 else dist.isend(tensor, 0)
        work.wait()
        back.wait()

    kinds: dict[str, Callable[[], object]] = {
        "a collective": lambda: dist.all_reduce(tensor),
        "a collective of autograd": lambda: autograd_collectives.all_reduce(tensor, dist.group.WORLD),
        "transfers": transfers,
        "the loss of a split vocabulary": lambda: vocabulary_parallel_losses(
            torch.ones(4, 8), torch.arange(4), first=8 * rank, group=dist.group.WORLD
        ),
        "a ring": lambda: ring_attention._receive(
            ring_attention._send_to_next(tensor, SequenceShards(rank, 2), dist.group.WORLD), tensor
        ),
    }
    return kinds[kind]


def _compared(kind: str) -> list[Any]:
    """Six steps, compared after each second one; rank 1 takes its time in the third and fourth."""
    process_group.set_timeout(100)
    stragglers = Stragglers(3.0, torch.device("cpu"), pytest.fail)
    waits, found = _waits_of(kind), []
    for number in range(1, 7):
        stragglers.before_step(number)
        if number in (3, 4) and dist.get_rank() == 1:
            time.sleep(DELAY)
        waits()
        stragglers.after_step(number, RESULT)
        if number % 2 == 0:
            found.append(stragglers.compare(DELAY if number == 6 and dist.get_rank() == 0 else 0.1))
    return found


class _Recorded(DeviceWaits):
    """Collectives of half a second each, as NCCL's recorder tells of them."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []

    def collective(self) -> None:
        about = {"record_id": len(self.entries), "duration_ms": 500.0}
        self.entries.append(about | {"time_created_ns": time.time_ns()})

    @property
    def seconds(self) -> float:
        self.count(self.entries)
        return self._total


def _on_a_gpu() -> list[float]:
    """Seconds of communication of six steps, compared after each second one, with others between them."""
    stragglers = Stragglers(3.0, torch.device("cpu"), pytest.fail)
    stragglers._on_device = waits = _Recorded()
    found = []

    def step() -> None:
        stragglers.before_step(1)
        waits.collective()
        stragglers.after_step(1, RESULT)

    for validates in (False, True, False):
        step()
        for _ in range(20 * validates):
            waits.collective()
        step()
        compared, _ = stragglers.compare(0.1)
        found.append(compared["communication_seconds"])
        for _ in range(20 * validates):
            waits.collective()
    return found


def _world() -> dict[str, Any]:
    return {kind: _compared(kind) for kind in KINDS} | {"on a GPU": _on_a_gpu()}


KINDS = (
    "a collective", "a collective of autograd", "transfers", "the loss of a split vocabulary", "a ring"
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_world(_world, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_rank_is_named_with_what_it_is_slow_at(found: list[dict[str, Any]], kind: str) -> None:
    host = socket.gethostname()
    for rank, ranks in enumerate(found):
        (even, nothing), (slow, computes), (reads, waits) = ranks[kind]
        assert nothing is None and even["median_rank_seconds"] < DELAY / 2
        assert computes["straggler"] == slow["slowest_rank"] == 1
        assert f"rank 1 on {host} takes" in computes["reason"]
        assert waits["straggler"] == reads["slowest_rank"] == 0
        assert "0.80 s of data" in waits["reason"]
        assert (slow["compute_seconds"] > 0.9 * DELAY) == (rank == 1)
        assert (slow["communication_seconds"] > 0.9 * DELAY) == (rank == 0)


def test_what_a_gpu_sends_between_steps_is_of_none(found: list[dict[str, Any]]) -> None:
    assert [ranks["on a GPU"] for ranks in found] == [[0.5, 0.5, 0.5]] * 2


def _beat_without_steps(folder: Path, checkpoint: dict[str, Any], name: str) -> dict[str, Any]:
    """The last beat of a run that trains nothing: its checkpoint is further, or only weights are saved."""
    tables: dict[str, Any] = {"checkpoint": checkpoint, "health": {"heartbeat_seconds": 0.001}}
    tables["metrics"] = {"save_for_all_ranks": True}
    for steps in (2, 1):
        training = {"steps": steps, "local_batch_size": 4}
        small_trainer(small_config(folder, training=training, **tables)).train()
    return json.loads((folder / name).read_text())


def _trained(folder: str) -> dict[str, Any]:
    config = small_config(
        folder,
        health={"straggler_factor": 1e9, "heartbeat_seconds": 0.001},
        metrics={"save_for_all_ranks": True},
        training={"steps": 3, "local_batch_size": 4},
    )
    trainer = small_trainer(config)
    name = "heartbeat.json" if dist.get_rank() == 0 else f"heartbeat.rank-{dist.get_rank()}.json"
    train_step, beats = trainer.train_step, []

    def step(*arguments: Any, **options: Any) -> Any:
        beats.append(json.loads(Path(folder, name).read_text()))
        return train_step(*arguments, **options)

    trainer.train_step = step  # type: ignore[assignment]
    trainer.train()
    beats.append(json.loads(Path(folder, name).read_text()))
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    for more in ({"enable": True}, {"enable": True, "create_seed_checkpoint": True}):
        beats.append(_beat_without_steps(Path(folder, str(len(more))), more, name))
    return {"lines": [json.loads(line) for line in lines], "beats": beats}


def test_a_run_compares_its_ranks_and_leaves_a_heartbeat(tmp_path: Path) -> None:
    (tmp_path / "metrics.rank-2.jsonl").write_text("{}\n")  # of an earlier run on more ranks
    for rank, ranks in enumerate(run_world(_trained, 2, str(tmp_path))):
        for line in ranks["lines"]:
            parts = line["data_seconds"] + line["compute_seconds"] + line["communication_seconds"]
            assert 0 < parts <= line["step_seconds"] and line["communication_seconds"] > 0
            assert line["slowest_rank_seconds"] >= line["median_rank_seconds"] > 0
        *beats, beat, further, seed = ranks["beats"]
        assert [it["step"] for it in [*beats, beat]] == [0, 1, 2, 3]  # those before a step are done in it
        assert (beat["rank"], beat["step"], beat["state"]) == (rank, 3, "finished")
        assert [(it["step"], it["state"]) for it in (further, seed)] == [(2, "finished"), (0, "finished")]
        assert beat["host"] == socket.gethostname() and abs(time.time() - beat["time"]) < 600
    assert list(rank_files(tmp_path)) == [1]


def test_a_heartbeat_names_what_a_run_is_in(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    heart = Heartbeat(path, seconds=1000, rank=0, step=lambda: 7, end=lambda: "stopped")
    heart.beat("training")
    first = path.read_text()
    heart.beat("training")
    assert path.read_text() == first  # not so soon again
    for name in ("data", "profiler"):
        with heart.during(name):
            assert path.read_text() == first  # each step has one
    assert path.read_text() == first
    with heart.during("checkpoint"):
        assert json.loads(path.read_text())["state"] == "checkpoint"
    assert json.loads(path.read_text())["state"] == "training"
    heart.seconds = 0.0
    with heart.during("data"):
        assert json.loads(path.read_text())["state"] == "data"
    assert [it.name for it in tmp_path.iterdir()] == ["heartbeat.json"]


def test_collectives_of_a_gpu_are_counted_once() -> None:
    waits = DeviceWaits()
    waits.step(0, 100)
    entries = [
        {"record_id": it, "duration_ms": 500.0 if it < 3 else None, "time_created_ns": it} for it in range(4)
    ]
    waits.count(entries)
    assert waits._total == pytest.approx(1.5)
    entries[3]["duration_ms"] = 250.0  # was under way
    waits.count(entries)
    assert waits._total == pytest.approx(1.75)
    entries = [{"record_id": 4, "duration_ms": 500.0, "time_created_ns": 200}]
    waits.count(entries)
    assert waits._total == pytest.approx(1.75) and waits._edges == []
