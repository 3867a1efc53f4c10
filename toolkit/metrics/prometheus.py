"""Write the latest metrics as a Prometheus text file for node_exporter's textfile collector."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.job import Metrics
from toolkit.config.local_paths import expand_user

PREFIX = "llama_toolkit_"


class PrometheusFile:
    """Rewrites ``path`` with one gauge per key of ``metrics.jsonl``, set to the key's latest value.

    Gauges are labeled with ``run`` and ``rank``; ``llama_toolkit_time_seconds`` is the time of writing.
    Non-finite values become NaN; values that are no longer logged are kept.
    """

    def __init__(self, path: Path, *, run: str, rank: int):
        self.path = path
        escaped = run.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'{{run="{escaped}",rank="{rank}"}}'
        self._values: dict[str, float] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Update the gauges with the numeric ``values`` of ``step`` and write the file.

        Raises:
            OSError: the folder cannot be written to.
        """
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._values |= {"step": step, **numbers, "time_seconds": time.time()}
        lines = []
        for key, value in self._values.items():
            name = PREFIX + re.sub(r"\W", "_", key, flags=re.ASCII)
            number = repr(value) if math.isfinite(value) else "NaN"
            lines += [f"# TYPE {name} gauge", f"{name}{self._labels} {number}"]
        # The collector reads every file that ends in .prom, even while it is being written.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
        temporary.replace(self.path)


def open_prometheus(options: Metrics, folder: Path, rank: int) -> PrometheusFile:
    """Open ``prometheus_file``, relative to ``folder``; ranks other than 0 add their number to its stem.

    Raises:
        OSError: its folder cannot be created.
    """
    assert options.prometheus_file
    path = folder / expand_user(options.prometheus_file)
    if rank:
        path = path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")
    return PrometheusFile(path, run=str(folder), rank=rank)
