"""Straggler detection: seconds per step in which each rank waits for data, computes, or communicates.

Ranks advance together, so a slow rank is one that does not wait in collectives while the others do. On a CPU,
the host blocks in collectives, so its clock is used. On a GPU, NCCL's flight recorder has the duration of
each collective on the device (TORCH_NCCL_ENABLE_TIMING), including the wait for peers and overlapped
computation; collectives between steps, for validation and saves, are excluded. The comparison takes one small
all-reduce per logged step.
"""

from __future__ import annotations

import socket
import time
from bisect import bisect
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from toolkit.compat import recorded_collectives
from toolkit.distributed.collectives import waited
from toolkit.step_hooks import StepHook, StepResult


class DeviceWaits:
    """Total duration of the steps' collectives on the GPU, from the entries of NCCL's flight recorder."""

    def __init__(self) -> None:
        self._total, self._last_id = 0.0, -1
        self._edges: list[int] = []  # begin and end of each step, in the recorder's Unix nanoseconds

    def step(self, begin: int, end: int) -> None:
        """Include collectives launched between these times, in Unix nanoseconds."""
        self._edges += [begin, end]

    @property
    def seconds(self) -> float:
        self.count(recorded_collectives("nccl").get("entries", []))
        return self._total

    def count(self, entries: list[dict[str, Any]]) -> None:
        """Add finished collectives of steps in a trace, oldest first, that have not been counted yet."""
        new = [it for it in entries if it["record_id"] > self._last_id and it.get("duration_ms") is not None]
        of_steps = [it for it in new if bisect(self._edges, it["time_created_ns"]) % 2]
        self._total += sum(it["duration_ms"] for it in of_steps) / 1e3
        self._last_id = max([self._last_id, *(it["record_id"] for it in new)])
        if entries:  # drop steps before the oldest entry
            del self._edges[: bisect(self._edges, entries[0]["time_created_ns"]) // 2 * 2]


class Stragglers(StepHook):
    """Compares ranks, and reports to ``record`` any rank that is ``factor`` times slower than the median of
    the others.

    All ranks must log the same steps.
    """

    def __init__(self, factor: float, device: torch.device, record: Callable[[dict[str, Any]], None]):
        self.factor, self.device, self.record = factor, device, record
        self._on_device = DeviceWaits() if device.type == "cuda" else None
        self._seconds, self._steps, self._waited, self._slow = 0.0, 0, 0.0, -1
        self._began = 0, 0.0, 0.0  # Unix nanoseconds, clock, and seconds waited before the step
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        self.hosts = hosts

    def before_step(self, step: int) -> None:
        self._began = time.time_ns(), time.perf_counter(), waited.seconds

    def after_step(self, step: int, result: StepResult) -> None:
        began_ns, began, before = self._began
        self._seconds += time.perf_counter() - began
        if self._on_device:
            self._on_device.step(began_ns, time.time_ns())
        else:
            self._waited += waited.seconds - before
        self._steps += 1

    def log_values(self, values: dict[str, Any]) -> dict[str, Any]:
        compared, event = self.compare(values["data_seconds"])
        if event:
            self.record(event)
        return values | compared

    def compare(self, data_seconds: float) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Return two values: this rank's mean seconds per step since the previous call, with the slowest
        rank's and the median of the others; and an event if a rank has become slow, or is no longer slow."""
        steps = max(1, self._steps)
        if self._on_device:
            before, now = self._waited, self._on_device.seconds
            seconds, self._waited = now - before, now
        else:
            seconds, self._waited = self._waited, 0.0
        local = [data_seconds, max(0.0, self._seconds - seconds) / steps, seconds / steps]
        self._seconds, self._steps = 0.0, 0
        all_ranks = torch.zeros(len(self.hosts), len(local), dtype=torch.float64)
        all_ranks[dist.get_rank()] = torch.tensor(local, dtype=torch.float64)
        all_ranks = all_ranks.to(self.device)
        dist.all_reduce(all_ranks)
        rows = all_ranks.tolist()
        busy = [data + compute for data, compute, _ in rows]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        middle = median(busy[:slowest] + busy[slowest + 1 :] or busy)
        values = {
            "compute_seconds": local[1],
            "communication_seconds": local[2],
            "slowest_rank": slowest,
            "slowest_rank_seconds": busy[slowest],
            "median_rank_seconds": middle,
        }
        return values, self._event(slowest, middle, rows[slowest])

    def _event(self, slowest: int, middle: float, row: list[float]) -> dict[str, Any] | None:
        busy = row[0] + row[1]
        slow = slowest if busy >= self.factor * middle > 0 else -1
        before, self._slow = self._slow, slow
        if slow == before:
            return None
        if slow < 0:
            return {"event": "NO STRAGGLER", "reason": f"rank {before} is no longer slower than the others"}
        reason = (
            f"rank {slow} on {self.hosts[slow]} takes {busy:.2f} s per step without waiting for others, "
            f"{busy / middle:.1f} times the median of the others: {row[1]:.2f} s of computation, "
            f"{row[0]:.2f} s of data"
        )
        return {"event": "STRAGGLER", "reason": reason, "straggler": slow}
