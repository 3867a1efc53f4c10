"""Words about a launch that failed: which rank was the first, and what it said."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.errors import EXIT_CONFIG, EXIT_DATA, EXIT_ERROR
from toolkit.launcher.supervisor import ENDED_WELL, Launch, Watch, Worker, say

if TYPE_CHECKING:
    from toolkit.launcher.fault_reports import Report

TAIL_LINES = 30


def _failed_by_itself(worker: Worker, watch: Watch, reports: Mapping[int, object]) -> bool:
    """Rather than because others were gone, which ranks report."""
    if worker.rank in watch.ended_by_us:
        return False
    return worker.rank not in reports or worker.process.returncode != EXIT_ERROR


def _gather(prefix: Path | None, launch: Launch) -> dict[int, Report]:
    if prefix is None:
        return {}
    from toolkit.launcher import fault_reports

    # Ranks on other machines may end a little later.
    patience = launch.peer_grace + launch.kill_grace if launch.nodes > 1 else 0.0
    return fault_reports.gather(prefix, launch.world_size, seconds=patience)


def explain(watch: Watch, code: int, prefix: Path | None) -> None:
    """Say which rank failed first, or is missed by the others, unless it has already told the user."""
    reports = _gather(prefix, watch.launch)
    failed = [worker for worker in watch.ended if worker.process.returncode not in ENDED_WELL]
    own = [worker for worker in failed if _failed_by_itself(worker, watch, reports)]
    first = (own or failed)[0]
    if code in (EXIT_CONFIG, EXIT_DATA):
        alike = [worker for worker in failed if worker.process.returncode == code]
        if any(worker.log is None for worker in alike):
            return
        first = alike[0]
    elif prefix and reports and not own:
        from toolkit.launcher import fault_reports

        size, known = watch.launch.world_size, watch.ended_by_us
        say(fault_reports.tell(reports, size, known, more=prefix.parent))
        return
    returned = first.process.returncode
    lines = first.log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if first.log else []
    shown = [worker.process.returncode for worker in own if worker.log is None]
    if not lines and returned > 0 and returned in shown:
        return  # a rank that is shown has told it, which one that a signal ended cannot
    local = f"local rank {first.rank - watch.launch.ranks.start} on {socket.gethostname()}"
    how = f"was ended by {signal.Signals(-returned).name}" if returned < 0 else f"ended with code {returned}"
    if returned == -signal.SIGKILL and first.rank not in watch.ended_by_us:
        how += " (by the kernel, if memory ran out: see dmesg)"
    if reports:
        how += f" in step {max(report.step for report in reports.values())}"
    say(f"rank {first.rank} ({local}) {how}")
    if lines:
        say("\n".join([f"the end of its output, {first.log}:", *lines]))
