"""How far the tokenising is: a bar on a terminal, a line now and then elsewhere, both with an estimate."""

from __future__ import annotations

import sys
import time
from types import TracebackType

FIRST_LINE_SECONDS = 2.0
LINE_SECONDS = 15.0


class Progress:
    """Reports to stderr while tokenising ``n_bytes`` of files; silent where not ``shown``."""

    def __init__(self, name: str, n_bytes: int, processes: int, *, shown: bool):
        self.name, self.n_bytes, self.shown = name, n_bytes, shown
        self.done = self.n_tokens = 0
        self.start = time.monotonic()
        self._next_line = self.start + FIRST_LINE_SECONDS
        self._bar = None
        if not shown:
            return
        by = "this process" if processes == 1 else f"{processes} processes"
        print(f"tokenising {name} ({n_bytes / 1e6:,.1f} MB) by {by}", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=n_bytes, unit="B", unit_scale=True, leave=False, desc="tokenising")

    def advance(self, n_bytes: int, n_tokens: int) -> None:
        """``n_bytes`` more of the files are done; ``n_tokens`` have been written so far."""
        self.done += n_bytes
        self.n_tokens = n_tokens
        if self._bar is not None:
            self._bar.update(n_bytes)
        elif self.shown and time.monotonic() >= self._next_line:
            seconds = time.monotonic() - self.start
            left = seconds * (self.n_bytes - self.done) / max(1, self.done)
            print(
                f"tokenising: {self.done / 1e6:,.0f} of {self.n_bytes / 1e6:,.0f} MB, {n_tokens:,} tokens, "
                f"about {left:,.0f} s left",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            self._next_line = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if self.shown and error is None:
            seconds = time.monotonic() - self.start
            rate = self.n_tokens / max(seconds, 1e-9)
            print(
                f"tokenised {self.n_tokens:,} tokens in {seconds:,.1f} s ({rate:,.0f} tokens/s)",
                file=sys.stderr, flush=True,
            )  # fmt: skip
