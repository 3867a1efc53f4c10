"""Measure tokens per second, MFU and step time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from toolkit.config.finetune import Finetune
from toolkit.config.job import Metrics
from toolkit.metrics.flops import peak_flops
from toolkit.metrics.flops_finetune import model_flops
from toolkit.models.common.args import ModelArgs


class SpeedMeter:
    """Measures the steps between two readings.

    Time inside :meth:`exclude` (checkpoint, validation, compile) is not step time: it is reported as
    ``<name>_seconds`` and does not lower tokens/s and MFU. ``mfu`` is None unless ``flops_per_step`` and
    ``peak_flops`` (of all devices together) are given. ``mark`` wraps each measured range with its name.
    """

    def __init__(
        self,
        *,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        mark: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ):
        self._seconds_at_peak = flops_per_step / peak_flops if flops_per_step and peak_flops else None
        self._clock = clock
        self.mark = mark
        self._reset()

    def step(self, tokens: int) -> None:
        """Count one finished global batch of ``tokens`` (on all ranks)."""
        self._steps += 1
        self._tokens += tokens

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Measure the time spent waiting for data, which is part of the step and reported as
        ``data_seconds``."""
        started = self._clock()
        with self.mark("data"):
            yield
        self._data += self._clock() - started

    @contextmanager
    def exclude(self, name: str) -> Iterator[None]:
        """Exclude the time inside the context from the step time and report it as ``<name>_seconds``."""
        started = self._clock()
        with self.mark(name):
            yield
        self.add_excluded(name, self._clock() - started)

    def add_excluded(self, name: str, seconds: float) -> None:
        """Exclude ``seconds`` that have already passed from the step time."""
        if seconds:
            self._excluded[name] = self._excluded.get(name, 0.0) + seconds

    def read(self) -> dict[str, float | None]:
        """Return the means over the steps since the previous reading and start a new one.

        Keys: ``tokens_per_second`` (all ranks), ``step_seconds`` and ``data_seconds`` (per step), ``mfu`` (0
        to 1 or None) and ``<name>_seconds`` of excluded time.
        """
        seconds = self._clock() - self._started - sum(self._excluded.values())
        rate = self._tokens / seconds if seconds > 0 else 0.0
        steps = max(1, self._steps)
        ideal = self._seconds_at_peak
        reading = {
            "tokens_per_second": rate,
            "step_seconds": seconds / steps,
            "data_seconds": self._data / steps,
            "mfu": self._steps * ideal / seconds if ideal and seconds > 0 else None,
        } | {f"{name}_seconds": spent for name, spent in self._excluded.items()}
        self._reset()
        return reading

    def _reset(self) -> None:
        self._started = self._clock()
        self._steps = 0
        self._tokens = 0
        self._data = 0.0
        self._excluded: dict[str, float] = {}


def build_speed_meter(
    options: Metrics,
    args: ModelArgs,
    *,
    seq_len: int,
    samples: int,
    device: torch.device,
    dtype: torch.dtype,
    finetune: Finetune,
    mark: Callable[[str], AbstractContextManager[object]],
) -> SpeedMeter:
    """Build the meter of a run whose steps have ``samples`` rows of ``seq_len`` tokens, including padding.
    MFU is None if the device's peak is unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = options.peak_tflops
    per_device = peak * 1e12 if peak else peak_flops(name, str(dtype).removeprefix("torch."))
    flops = model_flops(args, finetune, seq_len=seq_len)
    return SpeedMeter(
        flops_per_step=flops * seq_len * samples,
        peak_flops=per_device * dist.get_world_size() if per_device else None,
        mark=mark,
    )
