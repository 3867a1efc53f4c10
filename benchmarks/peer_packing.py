"""Packing conversations beside padding them, both by this toolkit, for benchmarks/peers.py.

The conversations are made: a question and an answer of words from the text that ships with the toolkit.
How many is drawn from log-normal distributions (medians of 15 and 60 words, sigma 0.8), so that most are
short and few are long, as in instruction data.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peer_models import LEARNING_RATE, SHAPES
from toolkit.config import Config
from toolkit.data.build import open_data
from toolkit.data.build_loader import validation_loader
from toolkit.data.conversation_rows import ConversationRows, statistics
from toolkit.metrics.startup_timer import StartupTimer
from toolkit.trainer import Trainer
from toolkit.validate import validate

ROOT = Path(__file__).parents[1]
SHAPE, LENGTH, ROWS, CONVERSATIONS = "33.6M", 512, 4, 96
FORMS = {"packed": True, "padded": False}


def write_conversations(file: Path) -> None:
    """Write the conversations as JSON lines, the same ones every time."""
    with gzip.open(ROOT / "toolkit" / "data" / "embedded" / "train.jsonl.gz", "rt", encoding="utf-8") as text:
        words = " ".join(json.loads(line)["text"] for line in text).split()
    chance = random.Random(0)

    def say(median: float) -> str:
        count = max(1, round(median * chance.lognormvariate(0, 0.8)))
        first = chance.randrange(len(words) - count)
        return " ".join(words[first : first + count])

    with file.open("w", encoding="utf-8") as lines:
        for _ in range(CONVERSATIONS):
            turns = [{"role": "user", "content": say(15)}, {"role": "assistant", "content": say(60)}]
            lines.write(json.dumps({"messages": turns}) + "\n")


def configuration(folder: Path, packing: bool, dtype: str, ranks: int) -> Config:
    """The config of a run on the conversations in ``folder``, on which it is validated, too."""
    return Config.model_validate(
        {
            "job": {"dump_folder": str(folder / ("packed" if packing else "padded"))},
            "model": {
                "name": "llama3", "flavor": "debugmodel", **SHAPES[SHAPE],
                "hf_assets_path": str(ROOT / "tests" / "assets" / "tokenizer"),
            },
            "data": {"format": "messages", "packing": packing, "cache_folder": str(folder / "cache")},
            "training": {
                "dataset_path": str(folder / "chats.jsonl"), "seq_len": LENGTH,
                "local_batch_size": ROWS, "global_batch_size": ROWS * ranks, "mixed_precision_param": dtype,
            },
            "validation": {
                "enable": True, "dataset_path": str(folder / "chats.jsonl"), "seq_len": LENGTH,
                "local_batch_size": ROWS,
            },
            "activation_checkpoint": {"mode": "none"},
            "metrics": {"enable_tensorboard": False},
        }
    )  # fmt: skip


class Form:
    """A run that packs or pads, of whose data each call is a step."""

    def __init__(self, folder: Path, name: str, dtype: str):
        self.config = configuration(folder, FORMS[name], dtype, dist.get_world_size())
        data = open_data(self.config, progress=False)
        self.trainer = Trainer(self.config, data, torch.device("cpu"), StartupTimer(enabled=False))
        rows = self.trainer.loader._data.dataset.rows[0]
        assert isinstance(rows, ConversationRows)
        counted = statistics(data.caches["training"], rows)
        self.facts: dict[str, Any] = {
            "rows": counted.rows, "filled": counted.filled / counted.places,
            "learnt": counted.learnt / counted.places, "lost": counted.tokens_cut, "words": str(counted),
        }  # fmt: skip
        mesh = self.trainer.mesh
        held_out = validation_loader(self.config, data, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
        assert held_out is not None
        found = validate(self.trainer.model_parts, held_out, device=torch.device("cpu"), limit=None)
        assert found is not None
        self.facts["loss"] = found["loss"]
        self.batches = iter(self.trainer.loader)

    def __call__(self) -> tuple[float, float]:
        result = self.trainer.train_step([next(self.batches)], learning_rate=LEARNING_RATE)
        return result.loss, result.grad_norm
