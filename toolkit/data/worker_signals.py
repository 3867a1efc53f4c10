"""The signals of processes that read or tokenise for a run. Imports no torch.

A scheduler sends the signal that asks a run to stop to all of its processes. The step in progress still needs
those that prepare data, and so does the one in which the ranks agree.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from toolkit.launcher.signals import asking


def leave_to_parent() -> None:
    """Ignore what asks to stop: the parent ends this process."""
    for number in asking():
        signal.signal(number, signal.SIG_IGN)


def outlive_the_scheduler(parent: int, worker: int) -> None:
    """Do so in a worker of torch's, which ends of SIGTERM from ``parent``."""
    leave_to_parent()
    if sys.platform == "darwin":  # cannot tell who sent a signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    threading.Thread(target=_end_with, args=(parent,), name="signals", daemon=True).start()


def _end_with(parent: int) -> None:
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)
