"""The state that all tests start from."""

from __future__ import annotations

import signal

# nohup has SIGHUP ignored and a shell's & SIGINT; what inherits that takes it as the user's wish.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
