"""One short run of a layout with all that is compared of it: weights, samples, losses and norms.

The model is tiny and reads bytes, so that the cost is in the steps and not in their arithmetic.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import layouts
from tests.helpers import in_layout
from tests.training import small_config, small_trainer, weights_digest
from toolkit.config import Config
from toolkit.parallel.dims import degrees
from toolkit.train_step import MicroBatch, StepResult

STEPS = 20
SAMPLES = 16
"""Samples of a global batch."""

VOCABULARY = 514
"""The tokenizer's 256 bytes and 256 special tokens, and two more: divisible by two ranks, not by four."""

Run = dict[str, Any]
"""The result of :func:`train`: plain values, so that a world can hand it back and a file keep it."""


def configure(folder: str | Path, row: layouts.Row, precision: str = "float32", steps: int = STEPS) -> Config:
    """The config of a row that is computed in ``precision``, with its files in ``folder``."""
    values = layouts.settings(row) | {
        "training.steps": steps,
        "training.seq_len": 32,
        "training.global_batch_size": SAMPLES,
        "training.mixed_precision_param": precision,
        "model.hf_assets_path": str(write_tokenizer(Path(folder, "tokenizer"))),
        "model.vocab_size": VOCABULARY,
        "compile.cache_folder": str(Path(folder, "compiled")),
    }
    tables: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        table, _, name = key.partition(".")
        tables[table][name] = value
    mesh = degrees(small_config(folder, **tables).parallelism, int(row["ranks"]))
    tables["training"]["local_batch_size"] = SAMPLES // ((mesh.dp if mesh else 1) * int(row["accumulation"]))
    return small_config(Path(folder, "run"), **tables)


def write_tokenizer(folder: Path) -> Path:
    """Make ``folder`` one of a tokenizer of single bytes, in Llama 3's format."""
    file = folder / "tokenizer.model"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
        part = file.with_suffix(f".{os.getpid()}")  # several ranks may come at once
        part.write_text("".join(lines))
        part.replace(file)
    return folder


def few_tokens(folder: str | Path) -> dict[str, Any]:
    """The ``model`` table of a vocabulary of bytes, with its tokenizer in ``folder``: in bf16, which CPUs
    without instructions for it multiply slowly, a step of a tiny model is otherwise spent in its head."""
    return {"hf_assets_path": str(write_tokenizer(Path(folder, "tokenizer"))), "vocab_size": VOCABULARY}


def train(folder: str, row: layouts.Row, precision: str = "float32", steps: int = STEPS) -> Run:
    """Run the row in the world that is there, which has its ranks. All ranks return the same."""
    # Compiled code is found again by shapes and not, for one, by the memory budget it was compiled for.
    torch._dynamo.reset()
    trainer = small_trainer(configure(folder, row, precision, steps))
    weights = weights_digest(trainer.model_parts.models[0])
    seen: list[torch.Tensor] = []
    take_step = trainer.train_step

    def recorded_step(batches: Sequence[MicroBatch], **options: Any) -> StepResult:
        seen.extend(batch["tokens"] for batch in batches)
        return take_step(batches, **options)

    trainer.train_step = recorded_step  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return {
        "weights": weights,
        "samples": _samples(torch.cat(seen), trainer.mesh.dp_rank, steps),
        "accumulation": trainer.batch.accumulation,
        "losses": [record["loss"] for record in trainer.history],
        "norms": [record["grad_norm"] for record in trainer.history],
    }


def train_all(folder: str, jobs: Sequence[tuple[layouts.Row, str]], steps: int) -> list[Run]:
    """Run one row and precision after the other, all of them of as many ranks as the world has."""
    runs = []
    for row, precision in jobs:
        with in_layout(f"{layouts.name(row)}, {precision}"):
            runs.append(train(folder, row, precision, steps))
    return runs


def differences(values: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Differences of the values, each relative to the expected one."""
    return [abs(value / other - 1) for value, other in zip(values, expected, strict=True)]


def _samples(mine: torch.Tensor, dp_rank: int, steps: int) -> list[str]:
    """Digest of every global batch, its rows in the order of the data-parallel ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (dp_rank, mine.view(steps, -1, mine.shape[-1])))
    whole = torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])], dim=1)
    return [hashlib.sha256(step.numpy().tobytes()).hexdigest() for step in whole]
