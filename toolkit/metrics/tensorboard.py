"""TensorBoard scalars and the configuration as text, in one folder for a run and all its resumptions."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SPEED = ("tokens_per_second", "mfu", "slowest_rank")


class TensorBoard:
    """Writes events into ``folder``; those beyond ``resume_step`` of an earlier run are purged from view.

    torch's writer is imported at the first event: it costs a tenth of a second, which the way to the
    first step need not pay.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0, config_text: str = ""):
        self._folder = folder
        self._resume_step = resume_step
        self._config_text = config_text
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the numbers among ``values`` at ``step``, each under the tag of :func:`tag`."""
        writer = self._open()
        for key, value in values.items():
            if isinstance(value, int | float):
                writer.add_scalar(tag(key), value, step)
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            _hush_its_thread()
            start = self._resume_step
            self._writer = SummaryWriter(str(self._folder), purge_step=start + 1 if start else 0)
            if self._config_text:
                # four spaces before each line: TensorBoard shows Markdown, and this is code
                indented = "\n".join("    " + line for line in self._config_text.splitlines())
                self._writer.add_text("config", indented, start)
        return self._writer


def _hush_its_thread() -> None:
    """Print no traceback of the thread that writes: its error is raised by the next call, and told."""
    before = threading.excepthook

    def hook(raised: threading.ExceptHookArgs) -> None:
        if not type(raised.thread).__module__.startswith("tensorboard."):
            before(raised)

    threading.excepthook = hook


def tag(key: str) -> str:
    """The TensorBoard tag of a key of ``metrics.jsonl``: train/, validation/, base_corpus/, speed/
    or memory/."""
    if key in _SPEED or key.endswith("_seconds"):
        return "speed/" + key
    for group in ("validation", "base_corpus", "memory"):
        if key.startswith(group + "_"):
            return f"{group}/{key.removeprefix(group + '_')}"
    return "train/" + key
