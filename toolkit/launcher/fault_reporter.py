"""Report the location of a rank in the code when a run breaks down, then exit.

A rank reports when a collective fails, or when its launcher asks (:data:`QUESTION`). The launcher must ask,
because a rank that is blocked in a collective does not return to Python until the timeout, and a rank in an
infinite loop never fails. A thread answers the launcher: on the signal, C code wakes it through a file
descriptor, whatever the main thread is doing.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from toolkit.errors import EXIT_ERROR
from toolkit.launcher import fault_reports
from toolkit.launcher.environment import QUESTION
from toolkit.launcher.fault_reports import Place, Report

PACKAGE = Path(__file__).parents[1]
PATIENCE_SECONDS = 10.0
# Messages of gloo's errors, which have no type of their own.
_LOST = re.compile("gloo/transport|Connection (closed|reset) by peer|[Tt]imed out waiting")
_TIMED_OUT = re.compile(r"[Tt]imed out waiting (\d+)ms")
_SAID_BY = re.compile(r"^\[[^]]*\] |[.] This is typically.*")  # gloo's file and line, and gloo's advice
_WAITS = str(PACKAGE / "distributed" / "collectives.py")
"""Every collective waits in this file; its caller shows the location."""
_TRANSFERS = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}
_Frames = list[traceback.FrameSummary]  # outermost first


class FaultReporter:
    """Reports faults of rank ``rank``; the names of its report and trace begin with ``prefix``.

    A ``supervised`` rank answers its launcher, which reports to the user. Other ranks wait for each other's
    reports, and the first of them reports to the user. ``step`` returns the step in progress.
    """

    def __init__(self, prefix: Path, rank: int, world_size: int, *, supervised: bool):
        self.prefix, self.rank, self.world_size = prefix, rank, world_size
        self.supervised = supervised
        self.step: Callable[[], int] = lambda: 0
        fault_reports.forget(prefix, rank)
        if supervised:
            self._listen()

    def _listen(self) -> None:
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)  # required by set_wakeup_fd
        signal.signal(QUESTION, lambda *_: None)
        signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=(receiver,), name="fault reporter", daemon=True).start()

    def _answer(self, receiver: int) -> None:
        while QUESTION not in os.read(receiver, 64):  # one byte per signal that Python handles
            pass
        main = sys._current_frames()[threading.main_thread().ident or 0]
        with suppress(Exception):  # the rank exits in any case
            self._report(_frames(traceback.walk_stack(main))[::-1])
        os._exit(EXIT_ERROR)

    def _grouped(self) -> bool:
        distributed = sys.modules.get("torch.distributed")
        return distributed is not None and distributed.is_initialized()

    def record_collectives(self, entries: int, *, timed: bool = False) -> None:
        """Make torch record the last ``entries`` collectives of groups that are created later and, if
        ``timed``, the duration of each on NCCL."""
        from toolkit.launcher import flight_recorder

        flight_recorder.enable(entries, self.prefix)
        if timed:
            os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"

    def failed(self, error: BaseException) -> str:
        """Report the collective that failed with ``error``, and return the message for the user."""
        error = _causes(error)[-1]
        frames = _frames(traceback.walk_tb(error.__traceback__))
        text = _SAID_BY.sub("", str(error).strip().split("\n")[0])
        try:
            report = self._report(frames, text)
        except OSError as problem:
            return f"rank {self.rank}: communication failed: {text}; its report cannot be written: {problem}"
        told = f"rank {self.rank}: communication failed in step {report.step}, {report.where}: {text}"
        first = fault_reports.first(self.prefix, self.world_size)
        if self.supervised or self.rank > first or not _TIMED_OUT.search(text):
            return told
        reports = fault_reports.gather(self.prefix, self.world_size, seconds=PATIENCE_SECONDS)
        if self.rank > min(reports):
            return told
        return f"{told}\n{fault_reports.tell(reports, self.world_size, {}, more=self.prefix.parent)}"

    @staticmethod
    def lost_peers(error: BaseException) -> bool:
        """Return whether ``error`` comes from a collective or transfer that other ranks did not join."""
        distributed = sys.modules.get("torch.distributed")
        kinds = (distributed.DistError,) if distributed else ()
        return any(
            isinstance(cause, kinds) or (isinstance(cause, RuntimeError) and _LOST.search(str(cause)))
            for cause in _causes(error)
        )

    def _report(self, frames: _Frames, error: str = "") -> Report:
        """Write the report, then the trace, which may take longer."""
        grouped = self._grouped()
        places: tuple[Place, ...] = ()
        place, seconds = None, 0.0
        if grouped:
            from toolkit.launcher import flight_recorder

            places, place, seconds = flight_recorder.standing()
        if _transfers(frames):
            pipelines = [place for place in places if place.name == "pp"]
            place = replace(pipelines[0], number=0, operation="a transfer") if pipelines else None
            seconds = 0.0
        if waited := _TIMED_OUT.search(error):
            seconds = int(waited[1]) / 1000
        waits = (
            bool(error)
            or (place is not None and not place.done)
            or "/torch/distributed/" in frames[-1].filename
        )
        report = Report(self.rank, self.step(), _where(frames), waits, place, seconds, places)
        fault_reports.write(self.prefix, report)
        if grouped:
            flight_recorder.write(self.prefix, self.rank)
        return report


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and its chain of causes, ending with the root cause."""
    causes = [error]
    while cause := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(cause)
    return causes


def _frames(walk: Iterator[tuple[FrameType, int]]) -> _Frames:
    """Return the frames of a stack walk, in order, without our own wait functions."""
    frames = traceback.StackSummary.extract(walk, lookup_lines=False)
    return [frame for frame in frames if frame.filename != _WAITS]


def _transfers(frames: _Frames) -> bool:
    """Return whether the innermost frame is in a send or receive between pipeline stages."""
    innermost = frames[-1]
    return innermost.name in _TRANSFERS or "/distributed/pipelining/" in innermost.filename


def _where(frames: _Frames) -> str:
    """Return the innermost line that is in the toolkit."""
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE):
            return f"at {path.relative_to(PACKAGE.parent)}:{frame.lineno} ({frame.name})"
    return "outside of the toolkit"
