"""torch.compile, block by block: one graph serves every block, and FSDP's hooks stay outside of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.models.llama.model import Llama


@dataclass(frozen=True)
class Compiling:
    """What to compile ("model", "loss") and how."""

    components: tuple[str, ...] = ("model", "loss")
    backend: str = "inductor"
    fullgraph: bool = True


def use_cache(folder: Path) -> None:
    """Keep compiled code in ``folder``; call before anything is compiled."""


def apply_compile(model: Llama, options: Compiling) -> None:
    """Compile in place."""
    raise NotImplementedError


class CompileClock:
    """How long this process spent on compiling."""

    def take(self) -> float:
        """Seconds since the last call."""
        return 0.0
