"""Where the time of a step goes, by torch's profiler, and a plot of steps beside a peer's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile

PARTS = ("matmuls", "attention", "communication", "optimizer", "the rest")
TEXT = (
    "Where the time of one more step goes, by torch's profiler on rank 0: products of linear layers and the "
    "head; attention's own operators; FSDP's gathers and reductions, with casts and waits for others; "
    "the update; the rest is norms, rotations, SwiGLU, loss, clipping and Python."
)
_MATMULS = ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "aten::mkldnn_linear")
_ATTENTION = (
    "toolkit::blockwise_attention",
    "toolkit::blockwise_attention_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)
_FSDP = ("FSDP::all_gather", "FSDP::post_backward_reduce")


def split(step: Callable[[], Any]) -> dict[str, float]:
    """The share of a step that each of ``PARTS`` takes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.perf_counter()
        step()
        total = (time.perf_counter() - started) * 1e6
    events = profiler.key_averages()
    shares = {
        "matmuls": sum(event.self_cpu_time_total for event in events if event.key in _MATMULS),
        "attention": sum(event.cpu_time_total for event in events if event.key in _ATTENTION),
        "communication": sum(event.cpu_time_total for event in events if event.key.startswith(_FSDP)),
        "optimizer": sum(event.cpu_time_total for event in events if event.key.startswith("Optimizer.step#")),
    }
    known = {name: time / total for name, time in shares.items()}
    return known | {"the rest": 1 - sum(known.values())}


def table(splits: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Rows of shares, by comparison and side."""
    lines = [f"| | | {' | '.join(PARTS)} |", "|---" * (2 + len(PARTS)) + "|"]
    for name, sides in splits.items():
        for side, shares in sides.items():
            cells = " | ".join(f"{shares[part]:.0%}" for part in PARTS)
            lines.append(f"| {name} | {side} | {cells} |")
    return lines


def draw(rates: Mapping[str, Sequence[float]], output: Path, title: str) -> None:
    """Draw how many times as fast as the peer each comparison's steps were: dots, and a bar of the median."""
    from toolkit.commands.plot import pyplot

    figure, axes = pyplot().subplots(figsize=(8, 1.2 + 0.3 * len(rates)), layout="constrained")
    axes.barh(list(rates), [median(ratios) for ratios in rates.values()], color="#5b8db8")
    for place, ratios in enumerate(rates.values()):
        axes.plot(ratios, [place] * len(ratios), ".", color="#22405c", markersize=4)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("times as fast as the peer")
    axes.set_title(title)
    figure.savefig(output, dpi=120)
