"""A collective and a transfer that one rank never joins, in a world of its own: the recorder is set up before
its group."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import free_port
from toolkit.distributed import process_group
from toolkit.launcher import fault_reports, flight_recorder
from toolkit.launcher.fault_reporter import FaultReporter
from toolkit.launcher.fault_reports import Place

FORMED_WITH, SET_LATER = 60, 2  # seconds of time-out


def _rank(rank: int, port: int, folder: Path, entries: int, told: Any, failed: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    prefix = folder / "comm_traces" / "rank_"
    flight_recorder.enable(entries, prefix)
    process_group.start(torch.device("cpu"), timeout_seconds=FORMED_WITH)
    other = dist.new_group([0, 1], group_desc="mesh_pp")
    dist.all_reduce(torch.ones(3, 5))
    process_group.set_timeout(SET_LATER)
    faults = FaultReporter(prefix, rank, 2, supervised=True)
    if rank == 0:
        for call in (
            lambda: dist.all_gather_into_tensor(torch.ones(14), torch.ones(7)),
            lambda: dist.recv(torch.ones(1), 1, group=other),
        ):
            started = time.monotonic()
            try:
                call()
            except RuntimeError as error:
                lost_peers = FaultReporter.lost_peers
                assert lost_peers(error) and not lost_peers(RuntimeError("of its own"))
                said = faults.failed(error)
            told.send((said, time.monotonic() - started, fault_reports.gather(prefix, 2)[0]))
        failed.set()
    else:
        failed.wait(60)


def _told(folder: Path, entries: int) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    failed, port = context.Event(), free_port()
    ranks = [
        context.Process(target=_rank, args=(rank, port, folder, entries, sender, failed)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    try:
        told = []
        for _ in range(2):
            assert receiver.poll(120)
            told.append(receiver.recv())
        return told
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()


def test_what_a_rank_waits_for_is_named_in_time(tmp_path: Path) -> None:
    (said, seconds, report), (_, transfer_seconds, transfer) = _told(tmp_path, 100)
    path = tmp_path / "comm_traces" / "rank_0.json"
    assert said.startswith("rank 0: communication failed") and "Timed out waiting" in said
    assert report.waits and (report.place.number, report.place.group) == (2, "default_pg")
    assert "gather" in report.place.operation and report.place.ranks == (0, 1)
    entries = json.loads(path.read_text())["gloo"]["entries"]
    assert [entry["input_sizes"] for entry in entries] == [[[3, 5]], [[7]]]
    # gloo does not record transfers, and would keep the time-out with which the group was formed.
    assert transfer.place == Place("mesh_pp", (0, 1), operation="a transfer", done=True)
    assert transfer.seconds == SET_LATER
    assert max(seconds, transfer_seconds) < FORMED_WITH / 2


def test_off_the_groups_are_known_still(tmp_path: Path) -> None:
    (said, _, report), _ = _told(tmp_path, 0)
    assert said.startswith("rank 0: communication failed")
    assert report.waits and report.place is None
    assert {place.ranks for place in report.places} == {(0, 1)}
    assert [path.name for path in (tmp_path / "comm_traces").iterdir()] == ["rank_0.report.json"]
