"""Ranks compared: the seconds of a step in which each waits for data, computes, or waits for the others.

Ranks step together, so that a slow one shows in the time that it does not wait in collectives, while the
others wait for it. On a CPU the host blocks there, and its clock tells. On a GPU it does not: there NCCL's
flight recorder has the time of each collective on the device (TORCH_NCCL_ENABLE_TIMING), the wait for peers
included, also of those beside which the GPU computes; those between steps, of validations and saves, are left
out. Comparing costs one small all-reduce a logged step.
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
    """Seconds that collectives of steps have been under way on the GPU, as far as NCCL's recorder remembers
    them."""

    def __init__(self) -> None:
        self._total, self._seen = 0.0, -1
        self._edges: list[int] = []  # begin and end of each step, in the recorder's Unix nanoseconds

    def step(self, begin: int, end: int) -> None:
        """Count the collectives that were asked for in a step between these Unix nanoseconds."""
        self._edges += [begin, end]

    @property
    def seconds(self) -> float:
        self.count(recorded_collectives("nccl").get("entries", []))
        return self._total

    def count(self, entries: list[dict[str, Any]]) -> None:
        """Add up the collectives of a trace, oldest first, that are of steps, done and not counted yet."""
        new = [it for it in entries if it["record_id"] > self._seen and it.get("duration_ms") is not None]
        of_steps = [it for it in new if bisect(self._edges, it["time_created_ns"]) % 2]
        self._total += sum(it["duration_ms"] for it in of_steps) / 1e3
        self._seen = max([self._seen, *(it["record_id"] for it in new)])
        if entries:  # steps before the oldest are forgotten
            del self._edges[: bisect(self._edges, entries[0]["time_created_ns"]) // 2 * 2]


class Stragglers(StepHook):
    """Compares the ranks of the world, and names one that is ``factor`` times as slow as the others' median.

    All ranks log the same steps. ``record`` gets the events.
    """

    def __init__(self, factor: float, device: torch.device, record: Callable[[dict[str, Any]], None]):
        self.factor, self.device, self.record = factor, device, record
        self._on_device = DeviceWaits() if device.type == "cuda" else None
        self._seconds, self._steps, self._waited, self._slow = 0.0, 0, 0.0, -1
        self._began = 0, 0.0, 0.0  # in Unix nanoseconds and on the clock, and the seconds waited until then
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
        """This rank's seconds of a step since the last call, with those of the slowest rank and the median of
        the others; and what there is to tell, if a rank has become slow or is so no longer."""
        steps = max(1, self._steps)
        if self._on_device:
            before, now = self._waited, self._on_device.seconds
            seconds, self._waited = now - before, now
        else:
            seconds, self._waited = self._waited, 0.0
        own = [data_seconds, max(0.0, self._seconds - seconds) / steps, seconds / steps]
        self._seconds, self._steps = 0.0, 0
        everywhere = torch.zeros(len(self.hosts), len(own), dtype=torch.float64)
        everywhere[dist.get_rank()] = torch.tensor(own, dtype=torch.float64)
        everywhere = everywhere.to(self.device)
        dist.all_reduce(everywhere)
        rows = everywhere.tolist()
        busy = [data + compute for data, compute, _ in rows]
        slowest = max(range(len(busy)), key=busy.__getitem__)
        middle = median(busy[:slowest] + busy[slowest + 1 :] or busy)
        values = {
            "compute_seconds": own[1],
            "communication_seconds": own[2],
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
            return {"event": "NO STRAGGLER", "reason": f"rank {before} is no slower than the others any more"}
        reason = (
            f"rank {slow} on {self.hosts[slow]} takes {busy:.2f} s a step beside waiting for others, "
            f"{busy / middle:.1f} times the median of the others: {row[1]:.2f} s of computation, "
            f"{row[0]:.2f} s of data"
        )
        return {"event": "STRAGGLER", "reason": reason, "straggler": slow}
