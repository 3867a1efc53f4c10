"""The form in which weights on disk of any format are read: tensors by our names, any region of them.

Our names and our order of rows are Meta's: ``tok_embeddings.weight``, ``layers.0.attention.wq.weight``, …,
``norm.weight``, ``output.weight``, with the rows of wq and wk in pairs that RoPE turns together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from toolkit.errors import DataError
from toolkit.io.tensor_file import Region
from toolkit.models.common.args import ModelArgs


@dataclass(frozen=True)
class Stored:
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """Weights on disk. Opening one reads headers only; several threads may read at once.

    ``tensors`` are what is stored, complete or not: whoever loads compares them with a model of ``args``.
    A tied head is absent.
    """

    @property
    def place(self) -> Path: ...

    @property
    def args(self) -> ModelArgs: ...

    @property
    def tensors(self) -> Mapping[str, Stored]: ...

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        """The tensor, or a ``region`` of it, on the CPU in its stored dtype and in memory of its own.

        ``out`` is filled and returned where it is given: contiguous, of the stored dtype and of the shape of
        the region. Reads the bytes of the region, and at most those of the whole rows or heads that it cuts.

        Raises:
            DataError: the file has changed, is shorter than its header says, or cannot be read.
        """
        ...


HEAD, EMBEDDING = "output.weight", "tok_embeddings.weight"


def without_tied_head(source: WeightSource, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """``tensors`` without a head that is stored although it is tied, as Meta does.

    Raises:
        DataError: the first rows of the head are not those of the embedding: it is not tied.
    """
    if not source.args.tie_embeddings or HEAD not in tensors:
        return dict(tensors)
    head, embedding = tensors[HEAD], tensors.get(EMBEDDING)
    if head == embedding:
        first = (slice(0, min(16, head.shape[0])), *(slice(0, size) for size in head.shape[1:]))
        if torch.equal(source.read(HEAD, first), source.read(EMBEDDING, first)):
            return {name: stored for name, stored in tensors.items() if name != HEAD}
    raise DataError(
        f"{source.place} has a head of its own, though its embedding is said to be tied: set "
        '"tie_word_embeddings" in config.json, or "tied_embeddings" in params.json, to false'
    )
