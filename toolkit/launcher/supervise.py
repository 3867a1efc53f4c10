"""Supervise the ranks of a single-machine launch, from start to exit code."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import EXIT_REQUEUE
from toolkit.launcher.failure import explain
from toolkit.launcher.supervisor import Launch, Watch, code_of, run_ranks, signals


def supervise(command: Sequence[str], launch: Launch, reports: Path | None = None) -> int:
    """Run ``command`` once per rank of this node and return the exit code that describes how they ended.

    Ranks that lose their peers write reports whose paths begin with ``reports``.

    SIGTERM, SIGINT, SIGUSR1 and SIGHUP are forwarded once, and the ranks get ``launch.shutdown_timeout``
    seconds; a SIGINT that arrives ``launch.insist_after`` seconds later ends them at once. The exit code is
    also 75 if the signal itself ends ranks, which happens during startup, when nothing is lost. No rank
    outlives this call or, on Linux, this process.
    """
    logs = Path(tempfile.mkdtemp(prefix="toolkit-logs-"))
    watch = Watch(launch, [])
    with signals() as arrived:
        run_ranks(watch, command, reports, logs, arrived)
    code = code_of(watch)
    if watch.failed and code != EXIT_REQUEUE:
        explain(watch, code, reports)
        return code
    shutil.rmtree(logs, ignore_errors=True)
    return code
