"""Signal handling of processes that read or tokenize for a run. Imports no torch.

A scheduler sends the stop signal to all processes of a run. Data workers must survive it, because they are
needed to finish the current step and the one in which the ranks agree to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from toolkit.launcher.signals import asking


def leave_to_parent() -> None:
    """Ignore stop signals; the parent ends this process."""
    for number in asking():
        signal.signal(number, signal.SIG_IGN)


def outlive_the_scheduler(parent: int, worker: int) -> None:
    """Call :func:`leave_to_parent` in a torch worker, which continues to exit on SIGTERM from ``parent``."""
    leave_to_parent()
    if sys.platform == "darwin":  # it does not report the sender of a signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with, args=(parent,), name="signals", daemon=True).start()


def _end_with(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
