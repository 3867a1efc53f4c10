"""Print one line per logged step, and a progress bar on a terminal. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

_RESET = "\033[0m"
_COLORS = {
    "step": "\033[31m",
    "loss": "\033[32m",
    "validation_loss": "\033[32m",
    "tokens_per_second": "\033[34m",
    "mfu": "\033[35m",
    "memory_gib": "\033[33m",
}
_FORMATS = {
    "event": "{}:",
    "reason": "{}",
    "samples": "(samples {0[0]:,} to {0[1]:,})",
    "loss": "loss {:.4f}",
    "validation_loss": "validation loss {:.4f}",
    "validation_ema_loss": "EMA {:.4f}",
    "validation_accuracy": "accuracy {:.2%}",
    "validation_f1": "macro F1 {:.4f}",
    "base_corpus_perplexity": "base corpus perplexity {:.2f}",
    "rewards/margins": "margin {:.3f}",
    "validation_rewards/margins": "margin {:.3f}",
    "rewards/accuracies": "accuracy {:.1%}",
    "validation_rewards/accuracies": "accuracy {:.1%}",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "mfu {:.1%}",
    "memory_gib": "mem {:.2f} GiB",
}
# keys that appear only in metrics.jsonl, or in another form
_HIDDEN = {
    *("tokens", "step_seconds", "data_seconds", "compute_seconds", "communication_seconds"),
    *("slowest_rank_seconds", "median_rank_seconds"),
}


def format_line(step: int, total_steps: int, values: Mapping[str, Any], *, color: bool = False) -> str:
    """Format the console line of ``step``; None values are omitted.

    >>> format_line(7, 100, {"loss": 4.81234, "lr": 3e-4, "tokens_per_second": 12345.6, "mfu": None})
    'step   7/100  loss 4.8123  lr 3.00e-04  12,346 tok/s'
    """
    width = len(str(total_steps))
    parts = [("step", f"step {step:>{width}}/{total_steps}")]
    for key, template in _FORMATS.items():
        if values.get(key) is not None:
            parts.append((key, template.format(values[key])))
    if values.get("step_seconds") and values.get("data_seconds") is not None:
        parts.append(("wait", f"wait {values['data_seconds'] / values['step_seconds']:.1%}"))
    parts += [(key, f"{key[5:]} {value:.4f}") for key, value in values.items() if key.startswith("eval/")]
    for key, value in values.items():
        if key.endswith("_seconds") and key not in _HIDDEN and value >= 0.05:  # smaller values round to 0.0
            parts.append((key, f"{key.removesuffix('_seconds')} {value:.1f} s"))
    return "  ".join(
        _COLORS[key] + text + _RESET if color and key in _COLORS else text for key, text in parts
    )


def _duration(seconds: float) -> str:
    """Format a duration, rounded.

    >>> _duration(90), _duration(36000)
    ('2 min', '10.0 h')
    """
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Console:
    """Prints lines above a progress bar with the remaining time; without a terminal, reports that time
    once."""

    def __init__(self, total_steps: int, *, resume_step: int = 0, color: bool = True):
        terminal = sys.stdout.isatty()
        self._total_steps = total_steps
        self._timed = 0
        self._color = color and terminal and not os.environ.get("NO_COLOR")
        self._bar: Any = None
        if terminal and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps, initial=resume_step, unit="step", dynamic_ncols=True, leave=False
            )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.say(format_line(step, self._total_steps, values, color=self._color))
        if seconds := values.get("step_seconds"):
            self._timed += 1
            left = seconds * (self._total_steps - step)
            if self._timed == 2 and self._bar is None and left >= 60:  # the first step is slower
                self.say(f"at this speed the remaining steps take about {_duration(left)}")

    def say(self, text: str) -> None:
        """Print ``text`` above the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def advance(self, step: int) -> None:
        """Move the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
