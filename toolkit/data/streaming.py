"""Text that is tokenised while it is trained on, from files here or in object storage; the disk keeps none.

The files are dealt out to V shards, in each epoch in another order, and a shard packs what its files hold
into rows. Sample k of the run is row k // V of shard k mod V, whatever the ranks and the workers: V is the
largest divisor of the global batch that is no more than the files. A rank reads the shards of its rows; where
several ranks have rows of one shard, each reads it. The position of a shard is where its next row begins: an
epoch, a file, a piece of it and a token of that.

Memory holds two pieces of 128 KiB of text a shard, the disk nothing. Going on after a stop reads the file of
each shard up to its piece, and tokenises that piece.
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
from toolkit.data.dataloader import FIELDS, Batch, Loader, check_same_base
from toolkit.data.hub import HubSource
from toolkit.data.packing import PackedRows, Sample
from toolkit.data.sampler import epoch_key, permute
from toolkit.data.sources import open_corpus
from toolkit.data.text_files import Piece
from toolkit.data.tokenize import Encoded, Encoder, TextEncoder
from toolkit.data.tokenize_helpers import Helper
from toolkit.errors import DataError

PIECE_BYTES = 1 << 17
"""Bytes of text that a shard reads and tokenises at a time: the first step waits for one of each shard."""
READERS = 16
"""Shards at most whose next piece is read and tokenised at the same time."""


class Position(NamedTuple):
    """Where a row begins: at ``token`` of a piece of the shard's ``file``-th file in an epoch."""

    epoch: int = 0
    file: int = 0
    piece: int = 0
    token: int = 0


class Encoders:
    """An encoder of pieces, in ``workers`` processes of its own, or in this one where there are none."""

    def __init__(self, encode: Encoder, workers: int):
        self._encode, self._idle = encode, queue.SimpleQueue[Helper]()
        for _ in range(workers):
            helper = Helper()
            helper.send(encode)
            self._idle.put(helper)
        self._readers = ThreadPoolExecutor(min(2 * workers, READERS), "streaming") if workers else None

    def next_of(self, pieces: Iterator[tuple[Position, Piece]]) -> Future[tuple[Position, Encoded]]:
        """The next of a shard's pieces as tokens, read and tokenised while others wait for nothing."""
        if self._readers:
            return self._readers.submit(self._next, pieces, self._by_helper)
        ready: Future[tuple[Position, Encoded]] = Future()
        ready.set_result(self._next(pieces, self._encode))
        return ready

    def _by_helper(self, piece: Piece) -> Encoded:
        helper = self._idle.get()
        try:
            helper.send(piece)
            found = helper.receive()
        finally:  # of one that has died, whoever takes it next hears so too
            self._idle.put(helper)
        if isinstance(found, Exception):
            raise found
        return found

    @staticmethod
    def _next(pieces: Iterator[tuple[Position, Piece]], encode: Encoder) -> tuple[Position, Encoded]:
        position, piece = next(pieces)
        return position, encode(piece)


class Shard:
    """Every V-th file of each epoch's order, packed into rows of ``seq_len`` tokens without an end."""

    def __init__(
        self,
        corpus: Corpus,
        order: Callable[[int], Sequence[int]],
        encoders: Encoders,
        *,
        seq_len: int,
        document_mask: bool,
    ):
        """``order`` gives the numbers of an epoch's files in ``corpus``, those of this shard."""
        self._corpus, self._order, self._encoders = corpus, order, encoders
        self._seq_len, self._document_mask = seq_len, document_mask
        self.go_to(Position())

    def go_to(self, position: Position) -> None:
        """Have the next row begin at ``position``."""
        self._start = position
        self._next: Future[tuple[Position, Encoded]] | None = None
        self._tokens = np.zeros(0, np.uint16)
        self._begins = np.zeros(0, np.int64)  # of documents in _tokens
        self._pieces: list[tuple[int, Position]] = []  # where in _tokens each begins, in ascending order
        self._row = 0
        self._fed = position.epoch  # the last epoch that has given tokens

    def prefetch(self) -> None:
        """Begin to read and tokenise the next piece, if that is not under way."""
        if self._next is None:
            if not self._pieces:
                self._source = self._read(self._start)
            self._next = self._encoders.next_of(self._source)

    @property
    def position(self) -> Position:
        """Where the next row begins."""
        at = self._row * self._seq_len
        passed = [(begin, piece) for begin, piece in self._pieces if begin <= at]
        if not passed:
            return self._start
        begin, piece = passed[-1]
        return piece._replace(token=at - begin)

    def skip(self, rows: int) -> None:
        """Go on behind so many rows."""
        for _ in range(rows):
            self._fill()
            self._row += 1

    def row(self) -> Sample:
        """The next row."""
        self._fill()
        rows = PackedRows(self._tokens, self._begins, self._seq_len, document_mask=self._document_mask)
        self._row += 1
        return rows.sample(self._row - 1)

    def _fill(self) -> None:
        """Have the tokens of the next row, and the one behind them, at hand."""
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

    def _append(self, position: Position, encoded: Encoded) -> None:
        done = self._row * self._seq_len
        last = max((number for number, (begin, _) in enumerate(self._pieces) if begin <= done), default=0)
        self._pieces = [(begin - done, piece) for begin, piece in self._pieces[last:]]
        self._row = 0
        kept, tokens = self._tokens[done:], encoded.tokens
        begins = np.cumsum(encoded.lengths) - encoded.lengths
        if not encoded.opens:
            begins = begins[1:]
        if not self._pieces:  # the first since a start: its row begins within the piece
            tokens, begins = tokens[self._start.token :], begins - self._start.token
            self._pieces.append((-self._start.token, position))
        else:
            self._pieces.append((len(kept), position))
        begins = np.concatenate([self._begins - done, begins + len(kept)])
        self._begins = np.unique(begins[begins >= 0])  # a document without tokens begins where the next does
        self._tokens = np.concatenate([kept, tokens]) if len(kept) else tokens

    def _read(self, start: Position) -> Iterator[tuple[Position, Piece]]:
        """The pieces from ``start`` on, without an end."""
        for epoch in iter(range(start.epoch, 1 << 62)):
            some = False
            for number, file in enumerate(self._order(epoch)):
                if (epoch, number) < start[:2]:
                    continue
                one = Corpus(self._corpus.name, (self._corpus.files[file],), self._corpus.text_column)
                for count, piece in enumerate(one.pieces(PIECE_BYTES)):
                    some = True
                    if (epoch, number, count) >= start[:3]:
                        yield Position(epoch, number, count), piece
            if not some and (epoch, 0) >= start[:2]:
                raise self._no_text()

    def _no_text(self) -> DataError:
        return DataError(f"{self._corpus.name}: the files of a shard hold no text")


class StreamedLoader(Loader):
    """Micro-batches of a rank, of a text that streams."""

    mixture = None

    def __init__(
        self, shards: dict[int, Shard], n_shards: int, batch: BatchShape, rows: range, counted: dict[str, Any]
    ):
        """``shards`` are those of this rank's ``rows`` of a global batch, by their numbers."""
        self._shards, self._n_shards, self._batch, self._rows = shards, n_shards, batch, rows
        self._counted = counted
        self._start = self._taken = 0
        self._note()

    @property
    def epoch_samples(self) -> int:
        """More than any run has: nobody has counted them."""
        return 1 << 62

    def _note(self) -> None:
        self._noted = {number: shard.position for number, shard in self._shards.items()}

    @property
    def identity(self) -> str:
        """Tell which samples these are."""
        return json.dumps(self._counted)

    @property
    def samples(self) -> int:
        """Samples consumed by the whole run, to the last complete global batch."""
        micro_batches = len(self._rows) // self._batch.local
        return self._start + self._taken // micro_batches * self._batch.total

    def conversations(self) -> Iterator[str]:
        """Tell nothing: text has none."""
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
                    self._note()  # this global batch is complete once its last micro-batch is handed over
                yield {
                    name: torch.from_numpy(np.stack([row[name] for row in rows[begin : begin + local]]))
                    if name in rows[0]
                    else None
                    for name in FIELDS
                }

    def _global_batch(self) -> list[Sample]:
        """This rank's rows of the next global batch; of a shard's other rows it goes past."""
        found: dict[int, Sample] = {}
        for number, shard in self._shards.items():
            for row in range(number, self._batch.total, self._n_shards):
                if row in self._rows:
                    found[row] = shard.row()
                else:
                    shard.skip(1)
        return [found[row] for row in self._rows]

    def state_dict(self) -> dict[str, Any]:
        """Samples consumed, of what, and where each shard goes on. Every rank calls it."""
        positions = dict(self._noted)
        if dist.is_initialized() and dist.get_world_size() > 1:
            gathered: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, self._noted)
            positions = {number: at for part in gathered for number, at in part.items()}
        at = [list(positions[number]) for number in range(self._n_shards)]
        return {"samples": self.samples, **self._counted, "positions": at, "positions_of": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples that ``state`` counts, at any number of ranks and workers.

        Raises DataError where the state counts samples of other files, another seed, packing or batch.
        """
        check_same_base(self._counted, state)
        ahead = (state["samples"] - state["positions_of"]) // self._n_shards
        for number, shard in self._shards.items():
            shard.go_to(Position(*state["positions"][number]))
            shard.skip(ahead)
        self._start, self._taken = int(state["samples"]), 0
        self._note()


def streamed_loader(
    config: Config, batch: BatchShape, *, dp_rank: int, dp_size: int, seed: int
) -> StreamedLoader:
    """The training corpus of ``config`` for rank ``dp_rank`` of ``dp_size``.

    Raises:
        DataError: a file is missing, or the ranks see different ones.
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
        "shuffle": data.shuffle, "seed": seed, "shards": shards, "piece_bytes": PIECE_BYTES,
    }  # fmt: skip
    _agree(fingerprint, corpus)
    encode = TextEncoder(corpus.text_column, tokenizer, ids_dtype(tokenizer))
    encoders = Encoders(encode, training.dataloader.num_workers)

    def order(shard: int) -> Callable[[int], Sequence[int]]:
        def of_epoch(epoch: int) -> Sequence[int]:
            mine = np.arange(shard, files, shards)
            return (permute(mine, files, epoch_key(seed, epoch)) if data.shuffle else mine).tolist()

        return of_epoch

    per_rank = batch.total // dp_size
    rows = range(dp_rank * per_rank, (dp_rank + 1) * per_rank)
    mine = {
        number: Shard(
            corpus, order(number), encoders, seq_len=training.seq_len, document_mask=data.document_mask
        )
        for number in sorted({row % shards for row in rows})
    }
    return StreamedLoader(mine, shards, batch, rows, counted)


def _fingerprint(corpus: Corpus, tokenizer: str) -> str:
    """Identify the files by names and sizes, wherever they lie, and what they are read by."""
    names: list[Any] = [
        str(file) if "@" in str(file) else (file.name, file.stat().st_size) for file in corpus.files
    ]
    parts = [corpus.identity or names, corpus.text_column, tokenizer]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _agree(fingerprint: str, corpus: Corpus) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, fingerprint)
    if len(set(found)) > 1:
        other = next(rank for rank, one in enumerate(found) if one != found[0])
        raise DataError(
            f"{corpus.name}: rank {other} sees other files, or files of other sizes, than rank 0\n"
            "  fix:  let all nodes see the same files"
        )
