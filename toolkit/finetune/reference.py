"""Reference log-probabilities of a run whose model cannot be its own reference.

DPO and KTO compare the model with the initial one. If more than a new adapter is trained, the initial model
computes the log-probability of every answer of the run once, before the first step, so that the steps need no
forward pass of a reference. The result for each corpus is stored next to the token caches:

    <cache folder>/references/<key>.bin    SHA-256 of the rest; float64 (conversations, columns)

The key is the SHA-256 of the initial weights' identity, the precision, the corpus's fingerprint and the row
length, at which answers are truncated. Every rank reads the whole file, 8 bytes per answer, or 16 for KTO. A
resumed run reads the same values. If a file is missing, the initial weights are loaded and its values
computed again before the checkpoint is loaded. Checkpoints record the identity of the initial weights, so
that a run cannot resume with another reference.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.config import Config
from toolkit.data.cache_folder import local_cache
from toolkit.data.dataloader import Loader
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError
from toolkit.finetune.base import base_of, fingerprint
from toolkit.finetune.open_adapter import open_adapter
from toolkit.finetune.preferences import DPOObjective
from toolkit.io.atomic import sync_file
from toolkit.models.common.args import ModelArgs
from toolkit.parallel.model_parts import ModelParts

VERSION = 1  # increment when the values change


class StoredReference:
    """The log-probabilities of the conversations of ``loaders``, in this order, for the objective of
    ``model_parts``."""

    def __init__(
        self,
        config: Config,
        args: ModelArgs,
        model_parts: ModelParts,
        loaders: Sequence[Loader],
        *,
        device: torch.device,
        ranks: Ranks,
    ):
        objective = model_parts.objective
        assert isinstance(objective, DPOObjective)
        self.model_parts, self.objective, self.loaders = model_parts, objective, loaders
        self.device, self.ranks = device, ranks
        self.identity = ranks.on_rank_0(lambda: _identity(config, args))
        corpora = [it for loader in loaders for it in loader.corpora]
        self.counts = [corpus.n_documents for corpus, _ in corpora]
        training = config.training
        precision = [training.dtype, training.mixed_precision_param, config.model.converters]
        parts = [VERSION, self.identity, precision, objective.columns]
        keys = [_hash([*parts, corpus.fingerprint, seq_len]) for corpus, seq_len in corpora]
        folder = local_cache(config.data.cache_folder) / "references"
        self.files = [folder / f"{key[:32]}.bin" for key in keys]

    def read(self) -> bool:
        """Set the objective's reference to the stored values; return False if a rank cannot read some."""
        found = [self._read(file, count) for file, count in zip(self.files, self.counts, strict=True)]
        values = [it for it in found if it is not None]
        if self.ranks.any_of([len(values) < len(found)])[0]:
            return False
        self.objective.stored = torch.from_numpy(np.concatenate(values)).to(self.device)
        return True

    def _read(self, file: Path, count: int) -> np.ndarray | None:
        size = count * len(self.objective.columns) * 8
        with contextlib.suppress(FileNotFoundError):
            content = file.read_bytes()
            if len(content) == 32 + size and hashlib.sha256(content[32:]).digest() == content[:32]:
                return np.frombuffer(content, np.float64, offset=32).reshape(count, -1)
        return None

    @torch.no_grad()
    def compute(self, *, dp_rank: int, dp_size: int) -> None:
        """Compute the values with the current weights, store them, and set the objective's reference to them.

        Raises:
            DataError: a file cannot be written.
        """
        model_parts, objective = self.model_parts, self.objective
        width = len(objective.columns)
        total = torch.zeros(sum(self.counts), width, dtype=torch.float64, device=self.device)
        with model_parts.evaluating():
            for batch in (
                it for each in self.loaders for it in each.every_row(dp_rank=dp_rank, dp_size=dp_size)
            ):
                prepared = model_parts.prepare(batch, self.device)
                sums_BWC = objective.log_probs(prepared, model_parts.forward)
                if sums_BWC is not None:
                    numbers_BW = prepared["conversations"]
                    assert numbers_BW is not None
                    sums = sums_BWC.flatten(0, 1) * model_parts.is_loss_rank
                    total.index_add_(0, numbers_BW.flatten(), sums)
        dist.all_reduce(total)
        objective.stored = total
        if os.environ.get("LOCAL_RANK", "0") == "0":
            self._write(total.cpu())

    def _write(self, total: Tensor) -> None:
        for file, values in zip(self.files, total.split(self.counts), strict=True):
            content = values.numpy().tobytes()
            temporary = file.with_suffix(f".{os.getpid()}")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                with open(temporary, "wb") as opened:
                    opened.write(hashlib.sha256(content).digest() + content)
                    sync_file(opened)
                os.replace(temporary, file)
            except OSError as error:
                raise DataError(
                    f"{file}, the reference of {len(values):,} answers, cannot be written: {error}\n"
                    "  fix:  set data.cache_folder to a folder that is writable and has room"
                ) from error


def _identity(config: Config, args: ModelArgs) -> str:
    """Return a hash of everything that determines the initial weights."""
    base, options = base_of(config, asdict(args)), config.finetune
    parts: list[Any] = [asdict(args), base["fingerprint"], base["quantized"]]
    parts.append(config.model.additional_special_tokens)
    if options.adds or config.checkpoint.exclude_from_loading:  # some are drawn from the seed
        adapter = options.model_dump(include={"adapter", options.adapter})
        parts += [config.debug.seed or 0, config.checkpoint.exclude_from_loading, adapter]
    if options.adapter_path:
        parts.append(fingerprint(open_adapter(options.adapter_path, args)))
    return _hash(parts)


def _hash(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
