"""The form in which weights on disk of any format are read: tensors by our names, any region of them.

Our names and our order of rows are Meta's: ``tok_embeddings.weight``, ``layers.0.attention.wq.weight``, …,
``norm.weight``, ``output.weight``, with the rows of wq and wk in pairs that RoPE turns together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from toolkit.errors import DataError
from toolkit.io.tensor_file import BUFFER_BYTES, Region
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.table import EMBEDDING, HEAD


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


class TiedHead:
    """Leaves a stored head out of ``tensors`` where the model ties it, and compares it with the embedding as
    that is read, so that no value is read twice and each rank compares its shard.

    ``key`` of the file ``config`` ties the two.

    Raises:
        DataError: the stored head is of another shape or dtype than the embedding.
    """

    def __init__(self, source: WeightSource, tensors: Mapping[str, Stored], *, key: str, config: str):
        self._wrong = (
            f"{source.place} stores an output head that differs from the embedding, to which {config} ties "
            "it\n"
            f'  fix:  set "{key}" to false in {config}, which keeps both'
        )
        self._stored = source.args.tie_embeddings and HEAD in tensors
        if self._stored and tensors[HEAD] != tensors.get(EMBEDDING):
            raise DataError(self._wrong)
        self.tensors = {name: it for name, it in tensors.items() if not self._stored or name != HEAD}

    def check(self, name: str, region: Region, read: Tensor, read_head: Callable[[Region], Tensor]) -> None:
        """Compare ``read``, a ``region`` of the tensor ``name``, with the same region of the stored head.

        The head is read in blocks of rows. Bits are compared, so that NaN equals itself.

        Raises:
            DataError: ``name`` is the embedding, and the head differs.
        """
        if not self._stored or name != EMBEDDING:
            return
        rows, *columns = region
        step = max(1, BUFFER_BYTES // max(1, read[:1].nbytes))
        for start in range(rows.start, rows.stop, step):
            block = slice(start, min(start + step, rows.stop))
            ours = read[block.start - rows.start : block.stop - rows.start]
            if not torch.equal(ours.view(torch.uint8), read_head((block, *columns)).view(torch.uint8)):
                raise DataError(self._wrong)
