"""The state that all tests start from."""

from __future__ import annotations

import signal

import pytest

# nohup has SIGHUP ignored and a shell's & SIGINT; what inherits that takes it as the user's wish.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _broken_pipes_are_errors() -> None:
    """Undo what --help has done in this process, which ends silently with its reader."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
