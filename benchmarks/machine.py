"""Describe the machine that a published number was measured on, in a line."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from toolkit.hardware import cores


def describe(device: str = "cpu", *, timed: bool = True) -> str:
    """Processor, versions and, of what is ``timed``, how busy the machine is."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_processor()}, {cores()} cores"
    about = f"{name}, torch {torch.__version__}, Python {platform.python_version()}."
    if not timed:
        return about
    return (
        f"{about} The load average before the start was {os.getloadavg()[0]:.1f}: where it is not near 0, "
        "other work shared the cores."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
