"""Log the steps of a run to the console, ``metrics.jsonl``, TensorBoard and trackers such as W&B."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.config.job import Metrics
from toolkit.config.local_paths import expand_user
from toolkit.errors import printable
from toolkit.io import standard_streams
from toolkit.metrics.console import Console
from toolkit.metrics.jsonl import JsonLines, first_loss, rank_files, set_aside
from toolkit.metrics.tensorboard import TensorBoard

if TYPE_CHECKING:
    from toolkit.metrics.prometheus import PrometheusFile
    from toolkit.metrics.trackers import Tracker

_TENSORBOARD, _PROM = "TensorBoard's events", "metrics.prometheus_file"
_OTHER_RANKS = "metrics.rank-N.jsonl of an earlier run"
_CONSOLE_LOST = "console_lost"


class MetricLogger:
    """Logs the metrics of a run into ``folder``.

    Rank 0 prints, and writes ``metrics.jsonl`` and ``<save_tb_folder>/``. With ``save_for_all_ranks``, other
    ranks write ``metrics.rank-N.jsonl`` and ``<save_tb_folder>/rank-N/``; otherwise they write nothing.
    ``resume_step`` is the step of the loaded checkpoint, 0 for a new run; later records in the files are
    dropped. A new run renames old files of ranks that write none now. ``config_text`` is written to
    TensorBoard, and ``config`` is sent to the trackers of ``enable_wandb`` and ``report_to``.

    A file that cannot be written never stops the run and is reported once. A lost console is reported as
    "console_lost" in the next record of ``metrics.jsonl``.

    Attributes:
        resume_step: the argument.
        first_loss: the first training loss of a resumed run, if rank 0's file contains it.
    """

    def __init__(
        self,
        options: Metrics,
        folder: Path | str,
        *,
        total_steps: int,
        resume_step: int = 0,
        rank: int = 0,
        world_size: int = 1,
        config_text: str = "",
        config: Mapping[str, Any] | None = None,
    ):
        folder = Path(folder)
        is_rank_0 = rank == 0
        self.resume_step = resume_step
        self.first_loss = first_loss(folder / "metrics.jsonl") if resume_step and is_rank_0 else None
        self._reported: set[str] = set()
        color = not options.disable_color_printing
        self._console = Console(total_steps, resume_step=resume_step, color=color) if is_rank_0 else None
        self._lines: JsonLines | None = None
        self._tensorboard: TensorBoard | None = None
        self._trackers: list[Tracker] = []
        self._prometheus: PrometheusFile | None = None
        if not (is_rank_0 or options.save_for_all_ranks):
            return
        self._name = name = "metrics.jsonl" if is_rank_0 else f"metrics.rank-{rank}.jsonl"
        self._lines = self._attempt(name, lambda: JsonLines(folder / name, resume_step=resume_step))
        if is_rank_0 and resume_step == 0:
            writers = world_size if options.save_for_all_ranks else 1
            self._attempt(_OTHER_RANKS, lambda: _set_aside_others(folder, writers))
        if options.enable_tensorboard:
            events = expand_user(options.save_tb_folder, inside=folder)
            self._tensorboard = TensorBoard(
                events if is_rank_0 else events / f"rank-{rank}",
                resume_step=resume_step,
                config_text=config_text if is_rank_0 else "",
            )
        if options.prometheus_file:
            from toolkit.metrics.prometheus import open_prometheus

            self._prometheus = self._attempt(_PROM, lambda: open_prometheus(options, folder, rank))
        if options.enable_wandb or options.report_to:
            from toolkit.metrics.trackers import TRACKERS, WandB

            wanted: list[type[Tracker]] = [WandB] if options.enable_wandb else []
            wanted += [TRACKERS[name] for name in options.report_to]
            of_rank = rank if options.save_for_all_ranks else None
            about: dict[str, Any] = {"resume_step": resume_step, "config": config or {}, "say": self.say}
            self._trackers = [tracker(folder, **about, rank=of_rank) for tracker in wanted]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log ``values`` (numbers or None) of ``step`` under the keys of ``metrics.jsonl``."""
        if self._console is not None:
            self._console.log(step, values)
        lines, tensorboard = self._lines, self._tensorboard
        if lines is not None:
            self._attempt(self._name, lambda: lines.write({"step": step, **values, **self._console_lost()}))
        if tensorboard is not None:
            self._attempt(_TENSORBOARD, lambda: tensorboard.write(step, values))
        if (prometheus := self._prometheus) is not None:
            self._attempt(_PROM, lambda: prometheus.write(step, values))
        for tracker in self._trackers:
            tracker.write(step, values)

    def draw(self, step: int, key: str, values_RC: np.ndarray) -> None:
        """Show a table of values as a heat map in TensorBoard; the neutral value is 1."""
        if (tensorboard := self._tensorboard) is not None:
            self._attempt(_TENSORBOARD, lambda: tensorboard.draw(step, key, values_RC))

    def say(self, text: str) -> None:
        """Print ``text`` from rank 0, above the progress bar."""
        if self._console is not None:
            self._console.say(printable(text))

    def advance(self, step: int) -> None:
        """Move the progress bar; call it every step, logged or not."""
        if self._console is not None:
            self._console.advance(step)

    def close(self) -> None:
        """Flush and close all outputs and remove the progress bar."""
        if self._lines is not None:
            self._attempt(self._name, self._lines.close)
        if self._tensorboard is not None:
            self._attempt(_TENSORBOARD, self._tensorboard.close)
        for tracker in self._trackers:
            tracker.close()
        if self._console is not None:
            self._console.close()

    def _attempt(self, name: str, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except OSError as error:
            if name not in self._reported:
                self.say(f"{name} cannot be written: {error}; training continues without it")
                self._reported.add(name)
            return None

    def _console_lost(self) -> dict[str, str]:
        """Return the field that reports a lost console in the next record, once."""
        reason = standard_streams.lost() if self._console is not None else ""
        if not reason or _CONSOLE_LOST in self._reported:
            return {}
        self._reported.add(_CONSOLE_LOST)
        return {_CONSOLE_LOST: reason}


def _set_aside_others(folder: Path, writers: int) -> None:
    for rank, path in rank_files(folder).items():
        if rank >= writers:
            set_aside(path)
