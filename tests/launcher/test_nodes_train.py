"""Training on several nodes: the curve of one process, whatever happens to nodes on the way."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.helpers import run_world
from tests.nodes import TINY, Cluster, Started, cluster, eventually, losses, newest, why_not

SKIP = why_not()
pytestmark = [pytest.mark.skipif(bool(SKIP), reason=SKIP), pytest.mark.timeout(900)]
STEPS = 12
SECONDS = 240  # a run on a busy machine: each rank imports torch
TOLERANCE = 1e-5


def _one_process(flags: Sequence[str]) -> dict[int, float]:
    import torch

    from tests.training import small_trainer
    from toolkit.config import load_config

    torch.set_num_threads(1)
    trainer = small_trainer(load_config(flags))
    assert trainer.train() == 0
    return {record["step"]: record["loss"] for record in trainer.history}


def _flags(folder: Path, *more: str, steps: int = STEPS) -> list[str]:
    run = [f"--job.dump_folder={folder}/run", f"--data.cache_folder={folder}/cache"]
    return [*TINY, *run, f"--training.steps={steps}", *more]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("one")
    return run_world(_one_process, 1, _flags(folder, "--checkpoint.enable=false"))[0]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def _at_step(folder: Path, step: int, started: Sequence[Started]) -> None:
    def there() -> bool:
        assert all(one.process.poll() is None for one in started), [one.text for one in started]
        return max(losses(folder / "run"), default=0) >= step

    assert eventually(there, SECONDS), [one.text for one in started]


def _ended(made: Cluster, started: Sequence[Started], code: int = 0) -> None:
    for one in started:
        assert one.wait(SECONDS) == code, one.text
    assert eventually(lambda: not any(node.processes() for node in made.nodes), 10)


def _same(folder: Path, expected: dict[int, float]) -> None:
    found = losses(folder / "run")
    assert found.keys() == expected.keys()
    apart = {step: found[step] - loss for step, loss in expected.items() if step in found}
    assert max(map(abs, apart.values())) <= TOLERANCE, apart


def test_two_nodes_train_as_one_process_and_start_again(folder: Path, expected: dict[int, float]) -> None:
    with cluster(2, folder / "logs") as made:
        flags = _flags(folder, "--checkpoint.interval=3")
        started = [node.launch(*flags, MAX_RESTARTS="1") for node in reversed(made.nodes)]
        _at_step(folder, 5, started)
        os.kill(started[0].ranks()[0], signal.SIGKILL)
        _ended(made, started)
    said = started[0].text
    assert "(local rank 0 on host1) was ended by SIGKILL" in said
    assert "all start again from the newest checkpoint, step " in said
    _same(folder, expected)


@pytest.mark.exhaustive
def test_four_nodes_of_two_ranks_train_as_one_process(folder: Path, expected: dict[int, float]) -> None:
    mesh = ["--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_replicate_degree=2"]
    with cluster(4, folder / "logs") as made:
        started = [node.launch(*_flags(folder, *mesh), NGPU="2") for node in made.nodes]
        _ended(made, started)
    _same(folder, expected)


def _saved_since(folder: Path, step: int) -> bool:
    return newest(folder / "run") >= step


@pytest.mark.exhaustive
def test_four_nodes_then_three_then_four(folder: Path) -> None:
    """Power off one node, then kill another's launcher; both return."""
    steps = 60
    meshes = "--parallelism.elastic_meshes=dp_shard=4,dp_shard=3"
    flags = _flags(folder, "--checkpoint.interval=2", meshes, steps=steps)
    quick = {"NNODES": "3:4", "NODE_TIMEOUT": "10", "LAST_CALL_TIMEOUT": "3"}
    with cluster(4, folder / "logs") as made:
        started = [node.launch(*flags, **quick) for node in made.nodes]
        *_, third, fourth = made.nodes
        _at_step(folder, 8, started)
        third.power_off()
        began = newest(folder / "run")
        assert eventually(lambda: _saved_since(folder, began + 4), SECONDS), started[0].text
        third.power_on()
        started[2] = third.launch(*flags, **quick)
        assert eventually(lambda: "node 2 (host2) can join" in started[0].text, SECONDS)
        _at_step(folder, 24, started)
        started[3].signal(signal.SIGKILL)
        began = newest(folder / "run")
        assert eventually(lambda: _saved_since(folder, began + 4), SECONDS), started[0].text
        started[3] = fourth.launch(*flags, **quick)
        _ended(made, started)
    said = started[0].text
    assert "node 2 (host2) is lost: nothing heard for 10 s" in said
    assert "node 3 (host3) is lost: its launcher has ended" in said
    assert "node 3 (host3) can join" in said
    alone = run_world(_one_process, 1, _flags(folder / "one", "--checkpoint.enable=false", steps=steps))[0]
    _same(folder, alone)


@pytest.mark.exhaustive
def test_a_rank_that_hangs_on_another_node_is_named(folder: Path) -> None:
    flags = _flags(folder, "--comm.train_timeout_seconds=10", "--checkpoint.interval=500", steps=1000)
    with cluster(2, folder / "logs") as made:
        started = [node.launch(*flags) for node in made.nodes]
        _at_step(folder, 3, started)
        os.kill(started[1].ranks()[0], signal.SIGSTOP)
        _ended(made, started, 1)
    said = (
        r"rank 1 did not take part in \w+ number \d+ of all ranks, for which rank 0 waited 1\d s, in step \d+"
    )
    for one in started:
        assert re.search(said + r" \d+; it is stopped \(SIGSTOP or a debugger\)", one.text), one.text


@pytest.mark.exhaustive
def test_torchrun_starts_two_nodes_and_starts_them_again(folder: Path, expected: dict[int, float]) -> None:
    words = ["--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--rdzv_id=101", "--rdzv_backend=c10d"]
    # By its name node 0 knows that it is the one; an address that its name does not lead to would not do.
    words += ["--rdzv_endpoint=host0:29500", "-m", "toolkit.train"]
    words += _flags(folder, "--checkpoint.interval=3")
    environ = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Else ranks that are started twice in one attempt find the addresses of those before in the store.
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    with cluster(2, folder / "logs") as made:
        started = [
            node.start(*torchrun, f"--local_addr={node.address}", *words, **environ) for node in made.nodes
        ]
        _at_step(folder, 5, started)
        os.kill(started[1].ranks()[0], signal.SIGKILL)
        _ended(made, started)
    _same(folder, expected)
