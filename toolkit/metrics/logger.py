"""Report a run's steps through one object: console, ``metrics.jsonl``, TensorBoard, W&B."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.job import Metrics
from toolkit.config.local_paths import expand_user
from toolkit.errors import printable
from toolkit.io import standard_streams
from toolkit.metrics.console import Console
from toolkit.metrics.jsonl import JsonLines, rank_files, set_aside
from toolkit.metrics.tensorboard import TensorBoard

if TYPE_CHECKING:
    from toolkit.metrics.prometheus import PrometheusFile
    from toolkit.metrics.wandb import WandB

_EVENTS, _PROM = "TensorBoard's events", "metrics.prometheus_file"
_OTHERS = "metrics.rank-N.jsonl of an earlier run"
_CONSOLE_LOST = "console_lost"


class MetricLogger:
    """Reports the metrics of a run into ``folder``.

    Rank 0 prints and writes ``metrics.jsonl`` and ``<save_tb_folder>/``; other ranks do nothing, or with
    ``save_for_all_ranks`` write ``metrics.rank-N.jsonl`` and ``<save_tb_folder>/rank-N/`` of what they log.
    ``resume_step`` is the step of the checkpoint that the run goes on from, 0 for a new run: what the files
    hold beyond it is dropped. A new run sets aside the files of those ranks that write none among its
    ``world_size``. ``config_text`` becomes TensorBoard text, and ``config`` that of the run at Weights &
    Biases, to which they send their metrics with ``enable_wandb``.

    A file that cannot be written is told once and does not stop the training; that the console cannot is told
    in ``metrics.jsonl``, as "console_lost" of the next record.
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
        chief = rank == 0
        self._told: set[str] = set()
        color = not options.disable_color_printing
        self._console = Console(total_steps, resume_step=resume_step, color=color) if chief else None
        self._lines: JsonLines | None = None
        self._tensorboard: TensorBoard | None = None
        self._wandb: WandB | None = None
        self._prometheus: PrometheusFile | None = None
        if not (chief or options.save_for_all_ranks):
            return
        self._name = name = "metrics.jsonl" if chief else f"metrics.rank-{rank}.jsonl"
        self._lines = self._attempt(name, lambda: JsonLines(folder / name, resume_step=resume_step))
        if chief and resume_step == 0:
            writers = world_size if options.save_for_all_ranks else 1
            self._attempt(_OTHERS, lambda: _set_others_aside(folder, writers))
        if options.enable_tensorboard:
            events = expand_user(options.save_tb_folder, inside=folder)
            self._tensorboard = TensorBoard(
                events if chief else events / f"rank-{rank}",
                resume_step=resume_step,
                config_text=config_text if chief else "",
            )
        if options.prometheus_file:
            from toolkit.metrics.prometheus import open_prometheus

            self._prometheus = self._attempt(_PROM, lambda: open_prometheus(options, folder, rank))
        if options.enable_wandb:
            from toolkit.metrics.wandb import WandB

            about: Any = {"resume_step": resume_step, "config": config or {}, "say": self.say}
            ranks = rank if options.save_for_all_ranks else None
            self._wandb = WandB(folder, rank=ranks, **about)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Report ``values`` (numbers or None) of ``step``, in the keys of ``metrics.jsonl``."""
        if self._console is not None:
            self._console.log(step, values)
        lines, tensorboard = self._lines, self._tensorboard
        if lines is not None:
            self._attempt(self._name, lambda: lines.write({"step": step, **values, **self._console_lost()}))
        if tensorboard is not None:
            self._attempt(_EVENTS, lambda: tensorboard.write(step, values))
        if (prometheus := self._prometheus) is not None:
            self._attempt(_PROM, lambda: prometheus.write(step, values))
        if self._wandb is not None:
            self._wandb.write(step, values)

    def say(self, text: str) -> None:
        """Print ``text`` from rank 0, above the progress bar."""
        if self._console is not None:
            self._console.say(printable(text))

    def advance(self, step: int) -> None:
        """Move the progress bar; called every step, logged or not."""
        if self._console is not None:
            self._console.advance(step)

    def close(self) -> None:
        """Flush and close everything; the bar disappears."""
        if self._lines is not None:
            self._attempt(self._name, self._lines.close)
        if self._tensorboard is not None:
            self._attempt(_EVENTS, self._tensorboard.close)
        for part in (self._wandb, self._console):
            if part is not None:
                part.close()

    def _attempt(self, what: str, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except OSError as error:
            if what not in self._told:
                self.say(f"{what} cannot be written: {error}; the training goes on without")
                self._told.add(what)
            return None

    def _console_lost(self) -> dict[str, str]:
        """Return what the next record is to say of a console that was lost, once."""
        reason = standard_streams.lost() if self._console is not None else ""
        if not reason or _CONSOLE_LOST in self._told:
            return {}
        self._told.add(_CONSOLE_LOST)
        return {_CONSOLE_LOST: reason}


def _set_others_aside(folder: Path, writers: int) -> None:
    for rank, path in rank_files(folder).items():
        if rank >= writers:
            set_aside(path)
