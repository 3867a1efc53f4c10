"""Batches for one rank: a pure function of the number of samples that the run has consumed.

For a start at sample s, global batch g contains samples [s + g·G, s + (g+1)·G) of the run. Data-parallel rank
r of R takes the r-th of R equal shards, ``local_batch_size`` samples at a time; if ``interleaved``, it takes
every R-th micro-batch, starting with the r-th. The samples do not depend on workers, prefetch depth or number
of ranks. The loader's state is therefore one counter, with a description of the samples, which detects
another corpus or mixture.
"""

from __future__ import annotations

import functools
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from toolkit.data.batch_size import BatchShape
from toolkit.data.packing import PADDING, Rows, Sample, corpus_rows
from toolkit.data.sampler import CorpusOrder
from toolkit.data.token_files import TokenCache
from toolkit.errors import DataError

if TYPE_CHECKING:
    from toolkit.data.mixture import MixtureOrder

Batch = dict[str, torch.Tensor | None]
FIELDS = ("tokens", "labels", "positions", "documents")
ORDERED_AT_ONCE = 4096  # samples whose order is computed in one vectorized step
ORDERED_SPAN = 1 << 19  # range of samples in one such step: a mixture computes all blocks in between

Order = Callable[[np.ndarray], np.ndarray]
"""Maps sample numbers of the run to indices in the corpora, both int64."""


class MicroBatches(Sampler[list[int]]):
    """Indices of this rank's micro-batches from ``start`` on; PADDING for rows beyond a finite end."""

    def __init__(
        self,
        n: int,
        order: Order,
        batch: BatchShape,
        *,
        dp_rank: int,
        dp_size: int,
        infinite: bool,
        interleaved: bool = False,
    ):
        self.n, self.global_batch_size, self.local_batch_size = n, batch.total, batch.local
        self.order, self.infinite = order, infinite
        rows = batch.total // dp_size
        self.offsets = dp_rank * rows + np.arange(rows)
        if interleaved:
            first = (np.arange(rows // batch.local) * dp_size + dp_rank) * batch.local
            self.offsets = (first[:, None] + np.arange(batch.local)).ravel()
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
    """Rows, collated one micro-batch at a time (torch's default collation would copy each row once more).

    The rows of several corpora are concatenated in the order of ``corpora``, sorted by name. If one corpus
    has weights, the weights of the others are 1. With ``numbered``, rows also have the numbers of their
    conversations, by document (seq_len,), counted over all corpora from this number on.
    """

    def __init__(self, corpora: Mapping[str, TokenCache], *, numbered: int | None = None, **options: Any):
        self.corpora, self.options, self.numbered = dict(corpora), options, numbered
        self.rows = [_rows(name, corpus, **options) for name, corpus in corpora.items()]
        self.starts = [0, *accumulate(map(len, self.rows))]
        weighted = any(corpus.weights is not None for corpus in corpora.values())
        self._plain = {"weights": np.ones(options["seq_len"], np.float32)} if weighted else {}
        self._plain |= {name: x for name, x in self.rows[0].blank().items() if name not in FIELDS}
        if numbered is not None:
            self._plain["conversations"] = np.zeros(options["seq_len"], np.int64)
            counts = (corpus.n_documents for corpus in corpora.values())
            self._first = list(accumulate(counts, initial=numbered))
        self._map = getattr(next(iter(corpora.values())).tokens, "map", map)  # concurrent in RemoteArray

    def __len__(self) -> int:
        return self.starts[-1]

    def __reduce__(self) -> tuple:
        # Workers that are not forked receive the names of cache folders instead of tokens.
        return functools.partial(MicroBatchDataset, numbered=self.numbered, **self.options), (self.corpora,)

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
        rows, k = self.rows[part], index - self.starts[part]
        sample = self._plain | rows.sample(k)
        if self.numbered is not None:
            there = self._first[part] + rows.indices(k)
            sample["conversations"] = np.pad(there, (0, rows.seq_len - len(there)))
        return sample


def _rows(name: str, corpus: TokenCache, **options: Any) -> Rows:
    if corpus.mask is not None:
        from toolkit.data.preference_rows import conversation_rows

        return conversation_rows(corpus, **options)
    if corpus.labels is not None:
        from toolkit.data.labeled_rows import LabeledRows

        return LabeledRows(corpus, **options)
    try:
        return corpus_rows(corpus.tokens, corpus.offsets, **options)
    except DataError as error:
        raise DataError(f"data.mixture.{name}: {error}" if name else str(error)) from None


def identity_collate(batch: Batch) -> Batch:
    """Return the batch unchanged; the dataset has already collated it."""
    return batch


class Loader:
    """Iterates over micro-batches: tokens, labels, positions (int64), documents (int32) and weights
    (float32), each (B, S).

    positions and documents are None without a document mask; weights are absent if no corpus has any. An
    infinite loader resumes from its state. A finite loader restarts with each ``iter``, yields each sample
    once, and pads the last global batch with rows without labels, so that all ranks have the same number of
    micro-batches.
    """

    def __init__(
        self,
        data: StatefulDataLoader,
        sampler: MicroBatches,
        counted: dict[str, Any],
        corpora: Sequence[TokenCache],
        order: CorpusOrder | MixtureOrder,
    ):
        self._data, self._sampler, self._counted, self.order = data, sampler, counted, order
        self._corpora = corpora
        self._previous: str | None = None  # phase of the run
        self._drawn: dict[str, list[int]] = {}  # of all corpora, in earlier phases
        self._micro_batches = len(sampler.offsets) // sampler.local_batch_size  # per global batch and rank
        self._start = 0
        self._taken = 0

    def set_phase(self, name: str, previous: str | None) -> None:
        """Count the samples of one phase of the run. Its corpora continue where those of ``previous`` end."""
        self._counted["phase"], self._previous = name, previous

    @property
    def mixture(self) -> MixtureOrder | None:
        """Order of a mixture, with the shares of its corpora; None for one corpus."""
        return None if isinstance(self.order, CorpusOrder) else self.order

    @property
    def epoch_samples(self) -> int:
        """Samples per pass over the corpus; for a mixture, the total of all its corpora."""
        return self._sampler.n

    @property
    def corpora(self) -> list[tuple[TokenCache, int]]:
        """The corpora in the order of their conversations, with the row length."""
        return [(corpus, self._counted["seq_len"]) for corpus in self._corpora]

    def every_row(self, *, dp_rank: int, dp_size: int) -> Iterator[Batch]:
        """Yield each row of the corpora once, divided over the ranks, without touching the loader's state."""
        size = self._sampler.local_batch_size
        shape = BatchShape(size * dp_size, size, 1)
        each: Order = lambda samples: samples  # noqa: E731
        rows = self._data.dataset
        for indices in MicroBatches(len(rows), each, shape, dp_rank=dp_rank, dp_size=dp_size, infinite=False):
            yield rows[indices]

    def conversations(self) -> Iterator[str]:
        """Describe how the conversations or labeled texts of each corpus fill its rows."""
        dataset = self._data.dataset
        for (name, corpus), rows in zip(dataset.corpora.items(), dataset.rows, strict=True):
            if corpus.mask is not None:
                from toolkit.data.conversation_rows import statistics

                yield f"{name and f'{name}: '}{statistics(corpus, rows)}"
            elif corpus.labels is not None:
                yield f"{name and f'{name}: '}{rows.describe()}"

    @property
    def identity(self) -> str:
        """Description that identifies the samples."""
        return json.dumps({**self._counted, "of": self._sampler.n})

    @property
    def samples(self) -> int:
        """Samples consumed by the whole run, up to the last complete global batch."""
        return self._start + self._taken // self._micro_batches * self._sampler.global_batch_size

    def __iter__(self) -> Iterator[Batch]:
        self._start = self.samples if self._sampler.infinite else 0
        self._taken = 0
        self._sampler.start = self._start
        return _Counted(self, iter(self._data))

    def check_ids(self, batch: Batch) -> None:
        """Raise DataError if an id is outside the tokenizer's vocabulary, where the embedding has no row."""
        of_classes = self._corpora[0].labels is not None and self._corpora[0].mask is None  # are not ids
        labels = None if of_classes else batch["labels"]
        highest = max(int(part.max()) for part in (batch["tokens"], labels) if part is not None)
        if highest >= self._corpora[0].n_words:
            folders = ", ".join(str(corpus.folder) for corpus in self._corpora)
            raise DataError(
                f"the token cache in {folders} is damaged: it contains the id {highest:,}, but the tokenizer "
                f"has {self._corpora[0].n_words:,} tokens\n"
                "  fix:  run llama-toolkit prepare-data --verify with the configuration of this run"
            )

    def state_dict(self) -> dict[str, int | str | bool]:
        """Return the number of consumed, not prefetched, samples and a description that identifies them."""
        drawn = {**self._drawn, **self.order.drawn(self.samples)}
        return {"samples": self.samples, **self._counted, "first": self.order.first, "drawn": drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the samples counted by ``state``, with any number of ranks, workers or batch size.

        Raises:
            DataError: The state counts samples of another corpus, seed or packing.
        """
        state = {"phase": "", "first": {}, "drawn": {}, **state}
        self._drawn, self._taken = state["drawn"], 0
        if self._previous is None or state["phase"] != self._previous:
            check_same_samples(self._counted, state)
            self._start, self.order.first = int(state["samples"]), state["first"]
            return
        is_text = re.compile(r"corpus|.*\.corpus|packing|shuffle|seed")
        same = {name: it for name, it in self._counted.items() if name in state and is_text.fullmatch(name)}
        if "mixture of " in str(same["corpus"]):
            del same["corpus"]
        check_same_samples(same, state)
        # The phase may have longer rows, that is fewer of the same corpus.
        done = {name: Fraction(*self._drawn[name]) for name in self._drawn}
        lengths = self.order.drawn(0)
        self.order.first = {
            name: math.ceil(done[name] * n) for name, (_, n) in lengths.items() if name in done
        }
        self._start = 0


class _Counted:
    """Checks and counts micro-batches when they are consumed, regardless of prefetching."""

    def __init__(self, loader: Loader, batches: Iterator[Batch]):
        self._loader, self._batches = loader, batches

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except (ConnectionError, EOFError) as error:  # the worker exited while sending its batch
            raise _worker_error("a DataLoader worker has exited") from error
        self._loader.check_ids(batch)
        self._loader._taken += 1
        return batch


def check_same_samples(counted: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Raise DataError if ``state`` counts different samples than ``counted``."""
    changed = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in counted.items()
        if state.get(name) != value
    ]
    if changed:
        raise DataError(
            f"the data position of the checkpoint does not match this run: {'; '.join(changed)}\n"
            "  fix:  restore these (corpus: the text and the tokenizer), or restart the data with "
            f'checkpoint.exclude_from_loading = ["dataloader"], in another job.dump_folder if this run has '
            "already done so"
        )


def lost_worker(error: RuntimeError) -> DataError | None:
    """Convert torch's error about an exited worker, which can interrupt the main process anywhere.

    Returns None for any other error.
    """
    match = re.match(r"DataLoader worker \(pid.*?\) [^.]*", str(error))
    return _worker_error(match[0]) if match else None


def _worker_error(what: str) -> DataError:
    return DataError(
        f"{what}: it was killed, or memory ran out (see dmesg)\n"
        "  fix:  lower training.dataloader.num_workers or prefetch_factor; the same command resumes from the "
        "newest checkpoint"
    )
