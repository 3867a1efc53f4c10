"""Tokens per second, MFU and where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from toolkit.config.finetune import Finetune
from toolkit.config.job import Metrics
from toolkit.metrics.flops import model_flops, peak_flops
from toolkit.models.common.args import ModelArgs


class SpeedMeter:
    """Measures the steps between two readings.

    Time under :meth:`apart` (checkpoint, validation, compile) belongs to no step: it is reported
    beside them as ``<name>_seconds``, and neither tokens/s nor MFU suffer from it.
    ``flops_per_step`` and ``peak_flops`` (all devices together) may be None: then ``mfu`` is null.
    ``mark`` is around each range, "data" and what is apart, with its name.
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
        """One global batch of ``tokens`` (all ranks') is done."""
        self._steps += 1
        self._tokens += tokens

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for data: part of the step, and told as ``data_seconds``."""
        started = self._clock()
        with self.mark("data"):
            yield
        self._data += self._clock() - started

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Around what is not training."""
        started = self._clock()
        with self.mark(name):
            yield
        self.add_apart(name, self._clock() - started)

    def add_apart(self, name: str, seconds: float) -> None:
        """Count ``seconds`` that have passed as not training."""
        if seconds:
            self._apart[name] = self._apart.get(name, 0.0) + seconds

    def read(self) -> dict[str, float | None]:
        """Means over the steps since the last reading, which ends here.

        Keys: ``tokens_per_second`` (all ranks), ``step_seconds``, ``data_seconds`` (both a step),
        ``mfu`` (0 to 1 or None) and ``<name>_seconds`` of what ran apart.
        """
        seconds = self._clock() - self._started - sum(self._apart.values())
        rate = self._tokens / seconds if seconds > 0 else 0.0
        steps = max(1, self._steps)
        least = self._seconds_at_peak
        reading = {
            "tokens_per_second": rate,
            "step_seconds": seconds / steps,
            "data_seconds": self._data / steps,
            "mfu": self._steps * least / seconds if least and seconds > 0 else None,
        } | {f"{name}_seconds": spent for name, spent in self._apart.items()}
        self._reset()
        return reading

    def _reset(self) -> None:
        self._started = self._clock()
        self._steps = 0
        self._tokens = 0
        self._data = 0.0
        self._apart: dict[str, float] = {}


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
    """Build the meter of a run's steps, each of ``samples`` rows of ``seq_len`` tokens, whether they are
    learnt or not; it knows no peak of a device that is not in our table."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = options.peak_tflops
    per_device = peak * 1e12 if peak else peak_flops(name, str(dtype).removeprefix("torch."))
    flops = model_flops(args, finetune, seq_len=seq_len)
    return SpeedMeter(
        flops_per_step=flops * seq_len * samples,
        peak_flops=per_device * dist.get_world_size() if per_device else None,
        mark=mark,
    )
