"""Text tokenized during training, from local files or object storage, without disk use.

In each epoch, the files are distributed over V shards in another order, and each shard packs the text of its
files into rows. Sample k of the run is row k // V of shard k mod V, regardless of ranks and workers. V is the
largest divisor of the global batch up to the number of files. A rank reads the shards that contain its rows;
ranks whose rows are in the same shard each read it. The position of a shard is the start of its next row:
epoch, file, chunk of the file, and token of the chunk.

Memory use is two chunks of 128 KiB of text per shard. Resuming reads the current file of each shard up to the
current chunk, and tokenizes that chunk.
"""

from __future__ import annotations

import hashlib
import json
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from toolkit.config import Config
from toolkit.data.batch_size import BatchShape, n_shards
from toolkit.data.build import corpora, run_tokenizer
from toolkit.data.build_cache import ids_dtype
from toolkit.data.corpus import Corpus
from toolkit.data.dataloader import FIELDS, Batch, Loader, check_same_samples
from toolkit.data.hub import HubSource
from toolkit.data.packing import PackedRows, Sample
from toolkit.data.sampler import epoch_key, permute
from toolkit.data.sources import open_corpus
from toolkit.data.text_files import Chunk
from toolkit.data.tokenize import Encoded, Encoder, TextEncoder
from toolkit.data.tokenize_helpers import Helper
from toolkit.errors import DataError

CHUNK_BYTES = 1 << 17
"""Bytes of text that a shard reads and tokenizes at a time; the first step waits for one chunk per shard."""
READERS = 16
"""Maximum number of shards whose next chunks are read and tokenized concurrently."""


class ShardPosition(NamedTuple):
    """The start of a row, which is ``token`` in a chunk of the shard's ``file``-th file in an epoch."""

    epoch: int = 0
    file: int = 0
    chunk: int = 0
    token: int = 0


class Encoders:
    """Encodes chunks in ``workers`` processes, or in this process if ``workers`` is 0."""

    def __init__(self, encode: Encoder, workers: int):
        self._encode, self._idle = encode, queue.SimpleQueue[Helper]()
        for _ in range(workers):
            helper = Helper()
            helper.send(encode)
            self._idle.put(helper)
        self._readers = ThreadPoolExecutor(min(2 * workers, READERS), "streaming") if workers else None

    def next_of(self, chunks: Iterator[tuple[ShardPosition, Chunk]]) -> Future[tuple[ShardPosition, Encoded]]:
        """Read and tokenize a shard's next chunk, concurrently with the chunks of other shards."""
        if self._readers:
            return self._readers.submit(self._next, chunks, self._by_helper)
        ready: Future[tuple[ShardPosition, Encoded]] = Future()
        ready.set_result(self._next(chunks, self._encode))
        return ready

    def _by_helper(self, chunk: Chunk) -> Encoded:
        helper = self._idle.get()
        try:
            helper.send(chunk)
            encoded = helper.receive()
        finally:  # if the helper died, its next user gets the same error
            self._idle.put(helper)
        if isinstance(encoded, Exception):
            raise encoded
        return encoded

    @staticmethod
    def _next(
        chunks: Iterator[tuple[ShardPosition, Chunk]], encode: Encoder
    ) -> tuple[ShardPosition, Encoded]:
        position, chunk = next(chunks)
        return position, encode(chunk)


class Shard:
    """Every V-th file of each epoch's order, packed into an infinite sequence of rows of ``seq_len``
    tokens."""

    def __init__(
        self,
        corpus: Corpus,
        order: Callable[[int], Sequence[int]],
        encoders: Encoders,
        *,
        seq_len: int,
        document_mask: bool,
    ):
        """``order`` returns the indices in ``corpus`` of this shard's files in an epoch."""
        self._corpus, self._order, self._encoders = corpus, order, encoders
        self._seq_len, self._document_mask = seq_len, document_mask
        self.go_to(ShardPosition())

    def go_to(self, position: ShardPosition) -> None:
        """Make the next row start at ``position``."""
        self._start = position
        self._next: Future[tuple[ShardPosition, Encoded]] | None = None
        self._tokens = np.zeros(0, np.uint16)
        self._begins = np.zeros(0, np.int64)  # starts of documents in _tokens
        self._chunks: list[tuple[int, ShardPosition]] = []  # starts of chunks in _tokens, ascending
        self._row = 0
        self._fed = position.epoch  # the last epoch that yielded tokens

    def prefetch(self) -> None:
        """Start to read and tokenize the next chunk, unless this is in progress."""
        if self._next is None:
            if not self._chunks:
                self._source = self._read(self._start)
            self._next = self._encoders.next_of(self._source)

    @property
    def position(self) -> ShardPosition:
        """Start of the next row."""
        at = self._row * self._seq_len
        passed = [(begin, chunk) for begin, chunk in self._chunks if begin <= at]
        if not passed:
            return self._start
        begin, chunk = passed[-1]
        return chunk._replace(token=at - begin)

    def skip(self, rows: int) -> None:
        """Skip ``rows`` rows."""
        for _ in range(rows):
            self._fill()
            self._row += 1

    def row(self) -> Sample:
        """Return the next row."""
        self._fill()
        rows = PackedRows(self._tokens, self._begins, self._seq_len, document_mask=self._document_mask)
        self._row += 1
        return rows.sample(self._row - 1)

    def _fill(self) -> None:
        """Read until the tokens of the next row, and one more, are available."""
        while len(self._tokens) - self._row * self._seq_len <= self._seq_len:
            self.prefetch()
            assert self._next is not None
            position, encoded = self._next.result()
            self._next = None
            if len(encoded.tokens):
                self._fed = position.epoch
            elif position.epoch > self._fed + 1:
                raise self._no_text()
            self._append(position, encoded)
            self.prefetch()

    def _append(self, position: ShardPosition, encoded: Encoded) -> None:
        done = self._row * self._seq_len
        last = max((number for number, (begin, _) in enumerate(self._chunks) if begin <= done), default=0)
        self._chunks = [(begin - done, chunk) for begin, chunk in self._chunks[last:]]
        self._row = 0
        kept, tokens = self._tokens[done:], encoded.tokens
        begins = np.cumsum(encoded.lengths) - encoded.lengths
        if not encoded.opens:
            begins = begins[1:]
        if not self._chunks:  # the first chunk after a start: its row starts within the chunk
            tokens, begins = tokens[self._start.token :], begins - self._start.token
            self._chunks.append((-self._start.token, position))
        else:
            self._chunks.append((len(kept), position))
        begins = np.concatenate([self._begins - done, begins + len(kept)])
        self._begins = np.unique(
            begins[begins >= 0]
        )  # documents without tokens start where the next document does
        self._tokens = np.concatenate([kept, tokens]) if len(kept) else tokens

    def _read(self, start: ShardPosition) -> Iterator[tuple[ShardPosition, Chunk]]:
        """Yield the chunks from ``start`` on, infinitely."""
        for epoch in iter(range(start.epoch, 1 << 62)):
            some = False
            for number, file in enumerate(self._order(epoch)):
                if (epoch, number) < start[:2]:
                    continue
                one = Corpus(self._corpus.name, (self._corpus.files[file],), self._corpus.text_column)
                for count, chunk in enumerate(one.chunks(CHUNK_BYTES)):
                    some = True
                    if (epoch, number, count) >= start[:3]:
                        yield ShardPosition(epoch, number, count), chunk
            if not some and (epoch, 0) >= start[:2]:
                raise self._no_text()

    def _no_text(self) -> DataError:
        return DataError(f"{self._corpus.name}: the files of a shard contain no text")


class StreamedLoader(Loader):
    """Iterates over a rank's micro-batches of streamed text."""

    mixture = None

    def __init__(
        self, shards: dict[int, Shard], n_shards: int, batch: BatchShape, rows: range, counted: dict[str, Any]
    ):
        """``shards`` maps numbers to the shards of this rank's ``rows`` of a global batch."""
        self._shards, self._n_shards, self._batch, self._rows = shards, n_shards, batch, rows
        self._counted = counted
        self._start = self._taken = 0
        self._note()

    @property
    def epoch_samples(self) -> int:
        """A number larger than any run needs, because the samples of streamed text are not counted."""
        return 1 << 62

    def _note(self) -> None:
        self._noted = {number: shard.position for number, shard in self._shards.items()}

    @property
    def identity(self) -> str:
        """Description that identifies the samples."""
        return json.dumps(self._counted)

    @property
    def samples(self) -> int:
        """Samples consumed by the whole run, up to the last complete global batch."""
        micro_batches = len(self._rows) // self._batch.local
        return self._start + self._taken // micro_batches * self._batch.total

    def conversations(self) -> Iterator[str]:
        """Return an empty iterator: plain text has no conversation statistics."""
        return iter(())

    def __iter__(self) -> Iterator[Batch]:
        self._start, self._taken = self.samples, 0
        for number, shard in self._shards.items():
            shard.go_to(self._noted[number])
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        local = self._batch.local
        while True:
            for shard in self._shards.values():
                shard.prefetch()
            rows = self._global_batch()
            for begin in range(0, len(rows), local):
                self._taken += 1
                if begin + local == len(rows):
                    self._note()  # the global batch is complete once its last micro-batch is consumed
                yield {
                    name: torch.from_numpy(np.stack([row[name] for row in rows[begin : begin + local]]))
                    if name in rows[0]
                    else None
                    for name in FIELDS
                }

    def _global_batch(self) -> list[Sample]:
        """Return this rank's rows of the next global batch, skipping the other rows of its shards."""
        samples: dict[int, Sample] = {}
        for number, shard in self._shards.items():
            for row in range(number, self._batch.total, self._n_shards):
                if row in self._rows:
                    samples[row] = shard.row()
                else:
                    shard.skip(1)
        return [samples[row] for row in self._rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of consumed samples, a description that identifies them, and the shards'
        positions. All ranks must call it."""
        positions = dict(self._noted)
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, self._noted)
            positions = {number: at for part in gathered for number, at in part.items()}
        at = [list(positions[number]) for number in range(self._n_shards)]
        return {"samples": self.samples, **self._counted, "positions": at, "positions_of": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after the samples counted by ``state``, with any number of ranks and workers.

        Raises:
            DataError: The state counts samples of other files, or of another seed, packing or batch.
        """
        check_same_samples(self._counted, state)
        ahead = (state["samples"] - state["positions_of"]) // self._n_shards
        for number, shard in self._shards.items():
            shard.go_to(ShardPosition(*state["positions"][number]))
            shard.skip(ahead)
        self._start, self._taken = int(state["samples"]), 0
        self._note()


def streamed_loader(
    config: Config, batch: BatchShape, *, dp_rank: int, dp_size: int, seed: int
) -> StreamedLoader:
    """Build the loader of the training corpus of ``config`` for rank ``dp_rank`` of ``dp_size``.

    Raises:
        DataError: A file is missing, or the ranks see different files.
    """
    options = next(corpus for corpus in corpora(config) if corpus.table == "training")
    tokenizer, training, data = run_tokenizer(config), config.training, config.data
    corpus = open_corpus(**options.arguments())
    if isinstance(corpus, HubSource):
        corpus = corpus.remote()
    files, shards = len(corpus.files), n_shards(len(corpus.files), batch.total)
    fingerprint = _fingerprint(corpus, tokenizer.fingerprint)
    counted = {
        "corpus": fingerprint, "seq_len": training.seq_len,
        "shuffle": data.shuffle, "seed": seed, "shards": shards, "piece_bytes": CHUNK_BYTES,
    }  # fmt: skip
    _agree(fingerprint, corpus)
    encode = TextEncoder(corpus.text_column, tokenizer, ids_dtype(tokenizer))
    encoders = Encoders(encode, training.dataloader.num_workers)

    def order(shard: int) -> Callable[[int], Sequence[int]]:
        def of_epoch(epoch: int) -> Sequence[int]:
            files_of_shard = np.arange(shard, files, shards)
            key = epoch_key(seed, epoch)
            return (permute(files_of_shard, files, key) if data.shuffle else files_of_shard).tolist()

        return of_epoch

    per_rank = batch.total // dp_size
    rows = range(dp_rank * per_rank, (dp_rank + 1) * per_rank)
    own_shards = {
        number: Shard(
            corpus, order(number), encoders, seq_len=training.seq_len, document_mask=data.document_mask
        )
        for number in sorted({row % shards for row in rows})
    }
    return StreamedLoader(own_shards, shards, batch, rows, counted)


def _fingerprint(corpus: Corpus, tokenizer: str) -> str:
    """Return a fingerprint of the files' names and sizes, not of their folder, and of how they are read."""
    names: list[Any] = [
        str(file) if "@" in str(file) else (file.name, file.stat().st_size) for file in corpus.files
    ]
    parts = [corpus.identity or names, corpus.text_column, tokenizer]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _agree(fingerprint: str, corpus: Corpus) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    fingerprints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, fingerprint)
    if len(set(fingerprints)) > 1:
        other = next(rank for rank, one in enumerate(fingerprints) if one != fingerprints[0])
        raise DataError(
            f"{corpus.name}: rank {other} sees other files, or files of other sizes, than rank 0\n"
            "  fix:  make the same files available on all nodes"
        )
