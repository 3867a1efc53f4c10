"""Qwen2.5's repositories on the Hugging Face Hub."""

from __future__ import annotations

from toolkit.models.common.args import takes_vocabulary
from toolkit.models.common.hub import Hub
from toolkit.models.qwen2.args import PRESETS

_PUBLISHED = {
    f"Qwen2.5-{size}{kind}": (model, size)
    for model, sizes in PRESETS.items()
    for size in sizes
    if not takes_vocabulary(size)
    for kind in ("", "-Instruct")
}


HUB = Hub("Qwen", _PUBLISHED)
