"""A collective that one rank never joins, in a world of its own: the recorder is set up before its group."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import free_port
from toolkit.distributed import flight_recorder, process_group


def _rank(rank: int, port: int, folder: Path, entries: int, told: Any, failed: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    prefix = folder / "comm_traces" / "rank_"
    flight_recorder.enable(entries, prefix)
    process_group.start(torch.device("cpu"), timeout_seconds=20)
    dist.all_reduce(torch.ones(3, 5))
    process_group.set_timeout(1)
    if rank == 0:
        try:
            dist.all_gather_into_tensor(torch.ones(14), torch.ones(7))
        except RuntimeError:
            told.send(flight_recorder.write(prefix, rank))
        failed.set()
    else:
        failed.wait(30)


def _told(folder: Path, entries: int) -> str:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    failed, port = context.Event(), free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, port, folder, entries, sender, failed)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        assert receiver.poll(60)
        return receiver.recv()
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()


def test_the_collective_that_a_rank_does_not_join_is_named(tmp_path: Path) -> None:
    told = _told(tmp_path, 100)
    path = tmp_path / "comm_traces" / "rank_0.json"
    assert "rank 0: the last collective" in told and str(path) in told
    assert "gather" in told and "[[7]]" in told and "number 2 of the group 'default_pg'" in told
    entries = json.loads(path.read_text())["gloo"]["entries"]
    assert [entry["input_sizes"] for entry in entries] == [[[3, 5]], [[7]]]


def test_off_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert _told(tmp_path, 0) == ""
    assert list(tmp_path.iterdir()) == []
