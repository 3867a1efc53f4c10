"""Build the training and validation loaders from the configuration."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchdata.stateful_dataloader import StatefulDataLoader

from toolkit.config import Config
from toolkit.config.training import Data, DataLoader, Training, Validation
from toolkit.data.batch_size import BatchShape
from toolkit.data.dataloader import Loader, MicroBatchDataset, MicroBatches, identity_collate
from toolkit.data.run_data import RunData
from toolkit.data.sampler import CorpusOrder
from toolkit.data.streaming import streamed_loader
from toolkit.data.token_files import MixturePart, TokenCache
from toolkit.data.worker_signals import outlive_the_scheduler

if TYPE_CHECKING:
    from toolkit.data.mixture import MixtureOrder


def build_loader(
    corpus: TokenCache | Sequence[MixturePart],
    table: Training | Validation,
    data: Data,
    batch: BatchShape,
    *,
    pad_id: int | None,
    dp_rank: int,
    dp_size: int,
    seed: int = 0,
    interleaved: bool = False,
    numbered: int | None = None,
) -> Loader:
    """Build the loader of rank ``dp_rank`` of ``dp_size`` over one corpus or the parts of a mixture.

    With the training table, the loader is infinite, and each epoch has its own order. With the validation
    table, it yields the corpus, or its first ``samples``, once and in order. If ``pad_id`` is None, padding
    is 0 (it is neither attended to nor predicted). ``persistent_workers`` and ``prefetch_factor`` are ignored
    without workers, as in torchtitan. For ``interleaved`` and ``numbered``, see
    :mod:`toolkit.data.dataloader`.

    Raises:
        DataError: A corpus is shorter than one sample.
        ValueError: The global batch is not a multiple of the micro-batches of all ranks, or the validation
            corpus is a mixture, which would yield some samples more than once and others not at all.
    """
    if batch.total % (batch.local * dp_size):
        raise ValueError(f"a global batch of {batch.total} is not a multiple of {batch.local} x {dp_size}")
    parts = [MixturePart("", 1.0, corpus)] if isinstance(corpus, TokenCache) else list(corpus)
    parts.sort(key=lambda part: part.name)
    dataset = MicroBatchDataset(
        {part.name: part.corpus for part in parts},
        numbered=numbered, seq_len=table.seq_len, packing=data.packing, document_mask=data.document_mask,
        pad_id=pad_id or 0,
    )  # fmt: skip
    once, samples = False, len(dataset)
    if isinstance(table, Validation):
        once, samples = True, samples if table.samples == -1 else min(table.samples, samples)
    lengths, shuffle = [len(rows) for rows in dataset.rows], data.shuffle and not once
    order: CorpusOrder | MixtureOrder = CorpusOrder(lengths[0], seed, shuffle)
    counted: dict[str, Any] = {"corpus": parts[0].corpus.fingerprint}
    if parts[0].name:
        order = mixture = _mixture(parts, lengths, seed=seed, shuffle=shuffle)
        counted = _text(parts, mixture)
        if once:
            raise ValueError("a mixture is infinite and cannot be used for validation")
    sampler = MicroBatches(
        samples, order, batch, dp_rank=dp_rank, dp_size=dp_size, infinite=not once, interleaved=interleaved
    )
    counted |= {"seq_len": table.seq_len, "packing": data.packing, "shuffle": shuffle, "seed": seed}
    corpora = [part.corpus for part in parts]
    return Loader(_torch_loader(dataset, sampler, table.dataloader), sampler, counted, corpora, order)


def _torch_loader(
    dataset: MicroBatchDataset, sampler: MicroBatches, options: DataLoader
) -> StatefulDataLoader:
    workers = options.num_workers
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=".*set_vital", category=UserWarning)
        return StatefulDataLoader(
            dataset, batch_size=None, sampler=sampler, num_workers=workers, pin_memory=options.pin_memory,
            collate_fn=identity_collate, persistent_workers=options.persistent_workers and workers > 0,
            prefetch_factor=options.prefetch_factor if workers > 0 else None,
            worker_init_fn=functools.partial(outlive_the_scheduler, os.getpid()),
        )  # fmt: skip


def _mixture(
    parts: Sequence[MixturePart], lengths: Sequence[int], *, seed: int, shuffle: bool
) -> MixtureOrder:
    from toolkit.data.mixture import MixtureOrder

    return MixtureOrder({part.name: part.weight for part in parts}, lengths, seed=seed, shuffle=shuffle)


def _text(parts: Sequence[MixturePart], mixture: MixtureOrder) -> dict[str, Any]:
    """Return values that identify the text of a mixture."""
    from toolkit.data.mixture import identity

    return identity(mixture.quotas) | {f"{part.name}.corpus": part.corpus.fingerprint for part in parts}


def training_loader(
    config: Config,
    data: RunData,
    batch: BatchShape,
    *,
    dp_rank: int,
    dp_size: int,
    seed: int,
    previous: str | None = None,
) -> Loader:
    """Build this rank's training loader. ``previous`` is the phase of the run before that of ``config``."""
    if config.data.streaming:
        return streamed_loader(config, batch, dp_rank=dp_rank, dp_size=dp_size, seed=seed)
    loader = build_loader(
        data.train(config), config.training, config.data, batch,
        pad_id=data.pad_id, dp_rank=dp_rank, dp_size=dp_size, seed=seed,
        interleaved=config.debug.bitwise_data_parallel,
        numbered=0 if config.finetune.stores_reference else None,
    )  # fmt: skip
    if config.phase is not None:
        loader.set_phase(config.phase, previous)
    return loader


def validation_loader(
    config: Config, data: RunData, *, dp_rank: int, dp_size: int, table: str = "validation"
) -> Loader | None:
    """Build this rank's loader of the held-out corpus in ``table``; return None if there is none."""
    if table not in data.caches:
        return None
    size, numbered = config.validation.local_batch_size, None
    if config.finetune.stores_reference and table == "validation":  # after those of training
        train = data.train(config)
        parts = [train] if isinstance(train, TokenCache) else [part.corpus for part in train]
        numbered = sum(corpus.n_documents for corpus in parts)
    return build_loader(
        data.caches[table], config.validation, config.data, BatchShape(size * dp_size, size, 1),
        pad_id=data.pad_id, dp_rank=dp_rank, dp_size=dp_size, numbered=numbered,
    )  # fmt: skip
