"""Write TensorBoard scalars and the configuration into one folder for a run and its resumptions."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.metrics.heat_map import heat_map

_SPEED = ("tokens_per_second", "mfu", "slowest_rank")


class TensorBoard:
    """Writes events into ``folder``; TensorBoard hides earlier events after ``resume_step``.

    torch's writer is imported at the first event, which saves a tenth of a second at startup.
    """

    def __init__(self, folder: Path, *, resume_step: int = 0, config_text: str = ""):
        self._folder = folder
        self._resume_step = resume_step
        self._config_text = config_text
        self._writer: Any = None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the numeric ``values`` of ``step``, each under its :func:`tag`."""
        writer = self._open()
        for key, value in values.items():
            if isinstance(value, int | float):
                writer.add_scalar(tag(key), value, step)
        writer.flush()

    def draw(self, step: int, key: str, values_RC: np.ndarray) -> None:
        """Add a heat map of values; the neutral value is 1."""
        writer = self._open()
        writer.add_image(tag(key), heat_map(values_RC), step, dataformats="HWC")
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            _silence_writer_thread()
            start = self._resume_step
            self._writer = SummaryWriter(str(self._folder), purge_step=start + 1 if start else 0)
            if self._config_text:
                # four spaces before each line make a Markdown code block, which TensorBoard renders
                indented = "\n".join("    " + line for line in self._config_text.splitlines())
                self._writer.add_text("config", indented, start)
        return self._writer


def _silence_writer_thread() -> None:
    """Silence the traceback of TensorBoard's thread: the next call raises its error again."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            before(args)

    threading.excepthook = hook


def tag(key: str) -> str:
    """Return the TensorBoard tag of a ``metrics.jsonl`` key: train/, validation/, eval/, base_corpus/, speed/
    or memory/."""
    if key.startswith("eval/"):
        return key
    if key in _SPEED or key.endswith("_seconds"):
        return "speed/" + key
    for group in ("validation", "base_corpus", "memory"):
        if key.startswith(group + "_"):
            return f"{group}/{key.removeprefix(group + '_')}"
    return "train/" + key
