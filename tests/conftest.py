"""The state that all tests start from."""

from __future__ import annotations

import signal

# nohup has SIGHUP ignored, and a run, which inherits that, takes it as the user's wish.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
