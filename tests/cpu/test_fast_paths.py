"""One option turns off all fast paths of a CPU: torch's operators, with the same losses."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import run_world
from tests.training import small_config, small_trainer
from toolkit import cpu, trainer
from toolkit.cpu.linear import is_faster
from toolkit.parallel import fsdp


class _OwnOperators(TorchDispatchMode):
    """Names of the toolkit's own operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "toolkit":
            self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def _train(folder: str, fast: bool) -> tuple[list[float], set[str]]:
    """Losses of four steps, and what of the fast paths was used."""
    config = small_config(Path(folder) / str(fast), training={"cpu_fast_paths": fast, "steps": 4})
    used = set()
    with (
        patch.object(trainer, "keep_freed_memory", lambda: used.add("memory")),
        patch.object(fsdp, "share_memory", lambda *_: used.add("shared memory")),
        _OwnOperators() as operators,
    ):
        here = small_trainer(config)
        batches = iter(here.loader)
        losses = []
        for _ in range(4):
            step = here.train_step(list(islice(batches, here.batch.accumulation)), learning_rate=1e-3)
            losses.append(step.loss)
    assert cpu.is_enabled() == fast
    return losses, used | operators.names


def _both(folder: str) -> dict[bool, tuple[list[float], set[str]]]:
    return {fast: _train(folder, fast) for fast in (True, False)}


def test_one_option_turns_all_off(tmp_path: Path) -> None:
    for found in run_world(_both, 2, str(tmp_path)):
        losses, used = found[True]
        assert used == {
            "memory",
            "shared memory",
            "blockwise_attention",
            "blockwise_attention_backward",
            "rms_norm",
            "rms_norm_backward",
        } | ({"onednn_linear"} if is_faster() else set())
        plain, used = found[False]
        assert used == set()
        assert plain == pytest.approx(losses, rel=1e-5) and plain != losses  # fp32 in another order
