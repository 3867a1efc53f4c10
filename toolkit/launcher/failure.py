"""Describe a failed launch: which rank failed first, and its last output."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_ERROR
from toolkit.launcher.supervisor import ENDED_WELL, Watch, Worker, say

if TYPE_CHECKING:
    from toolkit.launcher.fault_reports import Report

TAIL_LINES = 30


def _failed_by_itself(worker: Worker, watch: Watch, reports: Mapping[int, object]) -> bool:
    """Return whether the rank failed on its own. Otherwise it lost its peers, which ranks report."""
    if worker.rank in watch.ended_by_us:
        return False
    return worker.rank not in reports or worker.process.returncode != EXIT_ERROR


@dataclass(frozen=True)
class Failure:
    """A description of a rank that failed on its own, and the end of its output if that was not shown."""

    text: str
    log: Path | None
    lines: Sequence[str]
    told: bool
    """True if the rank has reported its error itself."""

    def show(self) -> None:
        if self.told:
            return
        say(self.text)
        if self.lines:
            say("\n".join([f"the end of its output, {self.log}:", *self.lines]))


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _failed(watch: Watch) -> list[Worker]:
    return [worker for worker in watch.ended if worker.process.returncode not in ENDED_WELL]


def any_failed_by_itself(watch: Watch, reports: Mapping[int, Report]) -> bool:
    """Return whether a rank of this node failed on its own, not because it lost its peers."""
    return any(_failed_by_itself(worker, watch, reports) for worker in _failed(watch))


def first_failure(watch: Watch, code: int, reports: Mapping[int, Report]) -> Failure | None:
    """Return the rank that failed first, or None if all failed ranks only lost their peers."""
    failed = _failed(watch)
    own = [worker for worker in failed if _failed_by_itself(worker, watch, reports)]
    told = False
    if code in (EXIT_CONFIG, EXIT_DATA):
        alike = [worker for worker in failed if worker.process.returncode == code]
        told = any(worker.log is None for worker in alike)
        first = alike[0]
    elif reports and not own:
        return None
    else:
        first = (own or failed)[0]
    returned = first.process.returncode
    lines = first.log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if first.log else []
    shown = [worker.process.returncode for worker in own if worker.log is None]
    # A shown rank has reported its error, unless a signal killed it.
    told = told or (not lines and returned > 0 and returned in shown)
    local = f"local rank {first.rank - watch.launch.ranks.start} on {socket.gethostname()}"
    how = f"was ended by {_signal_name(-returned)}" if returned < 0 else f"ended with code {returned}"
    if returned == -signal.SIGKILL and first.rank not in watch.ended_by_us:
        how += " (by the kernel, if memory ran out: see dmesg)"
    if reports:
        how += f" in step {max(report.step for report in reports.values())}"
    return Failure(f"rank {first.rank} ({local}) {how}", first.log, lines, told)


def explain(watch: Watch, code: int, prefix: Path | None) -> None:
    """Report which rank failed first, or which rank the others waited for, unless that rank has reported it
    itself."""
    reports: Mapping[int, Report] = {}
    if prefix:
        from toolkit.launcher import fault_reports

        reports = fault_reports.gather(prefix, watch.launch.world_size)
    failure = first_failure(watch, code, reports)
    if failure:
        failure.show()
    elif prefix:
        size, known = watch.launch.world_size, watch.ended_by_us
        say(fault_reports.tell(reports, size, known, more=prefix.parent))
