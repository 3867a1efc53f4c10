"""NEFTune: uniform noise on the embeddings in training (Jain et al. 2023, arXiv:2310.05914).

Each element of a token's embedding gets noise within ±alpha / √(L·D), where L is the number of tokens in the
token's document; padding and packed neighbors do not count. (transformers and trl use the length of the row.)

The noise is a function of the seed, the step, the sample's place in the global batch, and the position in the
row. Each block of positions has its own generator, and a rank draws only its blocks. The noise is therefore
the same on any mesh. Validation, which never calls :meth:`EmbeddingNoise.begin`, adds none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from toolkit.distributed.seeds import derived_seed
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.objective import MicroBatch

if TYPE_CHECKING:
    from toolkit.parallel.sequence_shards import SequenceShards

_BLOCK = 256
"""Positions that share a generator."""


class EmbeddingNoise:
    """A forward hook of the embedding; it must be called in the order of the samples.

    Attributes:
        step: the current step of the run, set before :meth:`begin`.
    """

    def __init__(
        self, alpha: float, mesh: Mesh, shards: SequenceShards | None, *, seed: int, interleaved: bool
    ):
        self.alpha, self.seed, self.step = alpha, seed, 0
        self.mesh, self.shards, self.interleaved = mesh, shards, interleaved
        self._rows: Iterator[tuple[int, Tensor | None]] = iter(())

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """Begin a pass over the prepared micro-batches of a step."""
        documents = [batch["documents"] for batch in batches]
        lengths = [None if it is None else document_lengths(it) for it in documents]
        sizes = [len(tokens) for batch in batches if (tokens := batch["tokens"]) is not None]
        ranks, rank = self.mesh.dp_size, self.mesh.dp_rank
        if self.interleaved:  # as the loader deals out the samples
            first = [(index * ranks + rank) * size for index, size in enumerate(sizes)]
        else:
            first = [rank * sum(sizes) + sum(sizes[:index]) for index in range(len(sizes))]
        self._rows = (
            (first[index] + row, None if (of_batch := lengths[index]) is None else of_batch[row])
            for index, size in enumerate(sizes)
            for row in range(size)
        )

    def __call__(self, module: nn.Module, args: tuple[Tensor], h_BSD: Tensor) -> Tensor:
        """Add noise to embeddings: all positions, or the shard of this cp and tp rank."""
        rows = list(islice(self._rows, len(h_BSD)))
        if not rows:
            return h_BSD
        tokens, dim = args[0].shape[1], h_BSD.shape[2]
        length = tokens * (self.shards.size if self.shards else 1)
        tp = self.mesh.tp if h_BSD.shape[1] < tokens else None
        runs = _runs(tokens, self.shards, *((tp.get_local_rank(), tp.size()) if tp else (0, 1)))
        noise = []
        for sample, lengths in rows:
            blocks = [self._draw(sample, first, stop, h_BSD) for first, stop in runs]
            if lengths is None:
                scale = h_BSD.new_full((), self.alpha / math.sqrt(length * dim), dtype=torch.float32)
            else:
                own = torch.cat([lengths[first:stop] for first, stop in runs])
                scale = (self.alpha / (own * dim).sqrt())[:, None]
            noise.append(torch.cat(blocks) * scale)
        return h_BSD + torch.stack(noise).to(h_BSD.dtype)

    def _draw(self, sample: int, first: int, stop: int, like: Tensor) -> Tensor:
        """Draw the noise (positions, D) of a sample from ``first`` to ``stop``, from -1 to 1 in fp32."""
        drawn = []
        for block in range(first // _BLOCK, -(-stop // _BLOCK)):
            generator = torch.Generator(like.device)
            generator.manual_seed(derived_seed(self.seed, self.step, sample, block))
            values = like.new_empty(_BLOCK, like.shape[2], dtype=torch.float32)
            drawn.append(values.uniform_(-1, 1, generator=generator))
        return torch.cat(drawn)[first % _BLOCK :][: stop - first]


@cache
def _runs(tokens: int, shards: SequenceShards | None, tp_rank: int, tp: int) -> list[tuple[int, int]]:
    """Return the ranges of positions on a rank, in rows of which its tp group has ``tokens`` tokens."""
    places = list(range(tokens))
    if shards:
        size = tokens * shards.size // shards.chunks
        places = [chunk * size + place for chunk in shards.of(shards.rank) for place in range(size)]
    places = places[tp_rank * tokens // tp : (tp_rank + 1) * tokens // tp]
    jumps = [index for index in range(1, len(places)) if places[index] != places[index - 1] + 1]
    ends = [*jumps, len(places)]
    return [(places[first], places[end - 1] + 1) for first, end in zip([0, *jumps], ends, strict=True)]


def document_lengths(documents_BS: Tensor) -> Tensor:
    """Return the number of tokens of each token's document, (B, S) fp32."""
    changes_BS = torch.zeros_like(documents_BS, dtype=torch.int64)
    changes_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    place_BS = changes_BS.cumsum(1)
    ones_BS = torch.ones_like(place_BS, dtype=torch.float32)
    return torch.zeros_like(ones_BS).scatter_add_(1, place_BS, ones_BS).gather(1, place_BS)
