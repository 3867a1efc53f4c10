"""Batches for one rank: a pure function of how many samples the run has consumed.

Global batch g after a start at sample s is samples [s + g·G, s + (g+1)·G) of the run. Data-parallel rank r
of R takes the r-th R-th of them, ``local_batch_size`` at a time. No worker, prefetch depth or number of
ranks changes which samples those are, so the loader's state is one counter (and what it counts, to
refuse another corpus or mixture).
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from toolkit.data.batch_size import BatchShape
from toolkit.data.packing import PADDING, Rows, Sample, corpus_rows
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError

if TYPE_CHECKING:
    from toolkit.data.mixture import MixtureOrder

Batch = dict[str, torch.Tensor | None]
FIELDS = ("tokens", "labels", "positions", "documents")
ORDERED_AT_ONCE = 4096  # samples whose place is computed in one vectorised step
ORDERED_SPAN = 1 << 19  # of the run, in which these lie: a mixture computes all the blocks between

Order = Callable[[np.ndarray], np.ndarray]
"""From the numbers of samples in the run to their indices in the corpora, both int64."""


class MicroBatches(Sampler[list[int]]):
    """Indices of this rank's micro-batches from ``start`` on; PADDING for rows past a finite end."""

    def __init__(
        self, n: int, order: Order, batch: BatchShape, *, dp_rank: int, dp_size: int, infinite: bool
    ):
        self.n, self.global_batch_size, self.local_batch_size = n, batch.total, batch.local
        self.order, self.infinite = order, infinite
        rows = batch.total // dp_size
        self.offsets = dp_rank * rows + np.arange(rows)
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        span = min(self.n, ORDERED_SPAN)
        at_once = max(1, min(ORDERED_AT_ONCE // len(self.offsets), span // self.global_batch_size))
        steps = np.arange(at_once)[:, None] * self.global_batch_size
        start = self.start
        while self.infinite or start < self.n:
            samples = (start + steps + self.offsets).ravel()
            indices = self.order(samples)
            if not self.infinite:
                begun = (start + steps < self.n).sum() * len(self.offsets)
                indices = np.where(samples < self.n, indices, PADDING)[:begun]
            yield from indices.reshape(-1, self.local_batch_size).tolist()
            start += at_once * self.global_batch_size


class MicroBatchDataset(Dataset[Batch]):
    """Rows, put together a micro-batch at a time (torch's own collation would copy each row once more).

    The rows of several corpora lie end to end, in the order of ``corpora``, which are by their names. Where
    one of them has weights, those of the others' rows are 1.
    """

    def __init__(self, corpora: Mapping[str, TokenCache], **options: Any):
        self.corpora, self.options = dict(corpora), options
        self.rows = [_rows(name, corpus, **options) for name, corpus in corpora.items()]
        self.starts = [0, *accumulate(map(len, self.rows))]
        weighted = any(corpus.weights is not None for corpus in corpora.values())
        self._plain = {"weights": np.ones(options["seq_len"], np.float32)} if weighted else {}
        self._map = getattr(next(iter(corpora.values())).tokens, "map", map)  # RemoteArray's: at once

    def __len__(self) -> int:
        return self.starts[-1]

    def __reduce__(self) -> tuple:
        # To a worker that is not forked go the names of the cache folders, never the tokens.
        return functools.partial(MicroBatchDataset, **self.options), (self.corpora,)

    def __getitem__(self, indices: list[int]) -> Batch:
        samples = list(self._map(self._sample, indices))
        return {
            name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
            if name in samples[0]
            else None
            for name in (*FIELDS, *self._plain)
        }

    def _sample(self, index: int) -> Sample:
        if index == PADDING:
            return self._plain | self.rows[0].blank()
        part = bisect_right(self.starts, index) - 1
        return self._plain | self.rows[part].sample(index - self.starts[part])


def _rows(name: str, corpus: TokenCache, **options: Any) -> Rows:
    if corpus.mask is not None:
        from toolkit.data.conversation_rows import ConversationRows

        return ConversationRows(corpus, **options)
    if corpus.labels is not None:
        from toolkit.data.labelled_rows import LabelledRows

        return LabelledRows(corpus, **options)
    try:
        return corpus_rows(corpus.tokens, corpus.offsets, **options)
    except DataError as error:
        raise DataError(f"data.mixture.{name}: {error}" if name else str(error)) from None


def as_it_is(batch: Batch) -> Batch:
    return batch


class Loader:
    """Iterates micro-batches: tokens, labels, positions int64, documents int32 and weights float32, each
    (B, S).

    positions and documents are None without a document mask; weights are left out where no corpus has some.
    An infinite loader goes on from where its
    state says; a finite one starts anew with each ``iter``, gives each sample once and ends with a global
    batch filled up by rows without labels, so that all ranks have equally many micro-batches.
    """

    mixture: MixtureOrder | None
    """The shares of the parts of a mixture."""

    def __init__(
        self,
        data: StatefulDataLoader,
        sampler: MicroBatches,
        counted: dict[str, Any],
        corpora: Sequence[TokenCache],
        mixture: MixtureOrder | None = None,
    ):
        self._data, self._sampler, self._counted, self.mixture = data, sampler, counted, mixture
        self._corpora = corpora
        self._micro_batches = len(sampler.offsets) // sampler.local_batch_size  # a global batch, of this rank
        self._start = 0
        self._taken = 0

    @property
    def epoch_samples(self) -> int:
        """Samples of one pass over the corpus; of a mixture, as many as its parts have together."""
        return self._sampler.n

    def conversations(self) -> Iterator[str]:
        """Tell how the conversations, or the texts with a class, of each corpus fill its rows."""
        dataset = self._data.dataset
        for (name, corpus), rows in zip(dataset.corpora.items(), dataset.rows, strict=True):
            if corpus.mask is not None:
                from toolkit.data.conversation_rows import statistics

                yield f"{name and f'{name}: '}{statistics(corpus, rows)}"
            elif corpus.labels is not None:
                yield f"{name and f'{name}: '}{rows.describe()}"

    @property
    def identity(self) -> str:
        """Tell which samples these are."""
        return json.dumps({**self._counted, "of": self._sampler.n})

    @property
    def samples(self) -> int:
        """Samples consumed by the whole run, to the last complete global batch."""
        return self._start + self._taken // self._micro_batches * self._sampler.global_batch_size

    def __iter__(self) -> Iterator[Batch]:
        self._start = self.samples if self._sampler.infinite else 0
        self._taken = 0
        self._sampler.start = self._start
        return _Counted(self, iter(self._data))

    def refuse_unknown_ids(self, batch: Batch) -> None:
        """Raise DataError where an id is none of the tokenizer's: an embedding has no row for it."""
        labels = None if self._corpora[0].labels is not None else batch["labels"]  # those are no ids
        highest = max(int(part.max()) for part in (batch["tokens"], labels) if part is not None)
        if highest >= self._corpora[0].n_words:
            folders = ", ".join(str(corpus.folder) for corpus in self._corpora)
            raise DataError(
                f"the token cache in {folders} is damaged: it has the id {highest:,}, and the tokenizer "
                f"{self._corpora[0].n_words:,} entries\n"
                "  fix:  python -m tools.prepare_data --verify with the configuration of this run"
            )

    def state_dict(self) -> dict[str, int | str | bool]:
        """Samples consumed (not prefetched) and what they were samples of."""
        return {"samples": self.samples, **self._counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that ``state`` counts, at any number of ranks, workers or batch size.

        Raises DataError where the state counts samples of another corpus, seed or packing.
        """
        check_same_base(self._counted, state)
        self._start, self._taken = int(state["samples"]), 0


class _Counted:
    """Checks and counts micro-batches as they are handed over, whatever has been prefetched behind them."""

    def __init__(self, loader: Loader, batches: Iterator[Batch]):
        self._loader, self._batches = loader, batches

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except (ConnectionError, EOFError) as error:  # the worker has ended while its batch was handed over
            raise _lost("a DataLoader worker has ended") from error
        self._loader.refuse_unknown_ids(batch)
        self._loader._taken += 1
        return batch


def check_same_base(counted: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise DataError where ``state`` has counted samples of something else than ``counted`` says."""
    changed = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in counted.items()
        if state.get(name) != value
    ]
    if changed:
        raise DataError(
            f"the data position of the checkpoint does not fit this run: {'; '.join(changed)}\n"
            "  fix:  restore these (corpus: the text and the tokenizer), or start the data anew with "
            f'checkpoint.exclude_from_loading = ["dataloader"], in another job.dump_folder where this run '
            "has done so already"
        )


def lost_worker(error: RuntimeError) -> DataError | None:
    """Turn ``error`` into what the user is told, if it is torch's about a worker that has ended.

    torch raises it in whatever this process is at, as soon as the worker ends.
    """
    said = re.match(r"DataLoader worker \(pid.*?\) [^.]*", str(error))
    return _lost(said[0]) if said else None


def _lost(what: str) -> DataError:
    """The error in which ``what`` is told."""
    return DataError(
        f"{what}: it was killed, or memory ran out (see dmesg)\n"
        "  fix:  lower training.dataloader.num_workers or prefetch_factor; the same command goes on from the "
        "newest checkpoint"
    )
