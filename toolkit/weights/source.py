"""The interface of weight sources: tensors on disk, in any format, by our names, read whole or by region.

``open.py`` finds the source of a folder.

Names and row order are Meta's, as in ``tok_embeddings.weight``, ``layers.0.attention.wq.weight``, …,
``norm.weight``, ``output.weight``, with the rows of wq and wk in adjacent pairs for RoPE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from toolkit.errors import DataError, first_few
from toolkit.io.tensor_file import BUFFER_BYTES, Region
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING, HEAD

_SHOWN = 20  # maximum number of names in a message


@dataclass(frozen=True)
class StoredTensor:
    """Shape and dtype of a tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """Weights on disk. Opening a source reads only headers; reading is thread-safe.

    ``tensors`` are the tensors on disk, without a tied head; loading compares them with a model of ``args``.
    """

    @property
    def place(self) -> Path: ...

    @property
    def args(self) -> ModelArgs: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        """Read a tensor, or a ``region`` of it, on the CPU in its stored dtype, into new memory or ``out``.

        ``out`` must be contiguous and have the stored dtype and the shape of the region. Only the bytes of
        the region are read, or at most those of all rows or heads that it intersects.

        Raises:
                DataError: the file has changed, is shorter than its header declares, or cannot be read.
        """
        ...


def reject_mismatches(place: Path, problems: Mapping[str, list[str]]) -> None:
    """Raise DataError if there are tensors, by kind of problem, that do not match the model's config."""
    lines = [f"{what}: {first_few(names, _SHOWN)}" for what, names in problems.items() if names]
    if lines:
        raise DataError("\n  ".join([f"{place} does not match the model in its config:", *lines]))


class TiedHead:
    """Removal of a stored head from ``tensors`` if the model ties it. The head is compared with the embedding
    when that is read, so that no value is read twice and each rank compares its shard.

    The setting that ties them is ``key`` in the file ``config``.

    Raises:
        DataError: the stored head has another shape or dtype than the embedding.
    """

    def __init__(self, source: WeightSource, tensors: Mapping[str, StoredTensor], *, key: str, config: str):
        self._error = (
            f"{source.place} stores an output head that differs from the embedding, although {config} ties "
            f'them\n  fix:  set "{key}" to false in {config} to keep both'
        )
        self._stored = source.args.tie_embeddings and HEAD in tensors
        if self._stored and tensors[HEAD] != tensors.get(EMBEDDING):
            raise DataError(self._error)
        self.tensors = {name: it for name, it in tensors.items() if not self._stored or name != HEAD}

    def check(self, name: str, region: Region, read: Tensor, read_head: Callable[[Region], Tensor]) -> None:
        """Compare ``read``, a ``region`` of the embedding, with the same region of the stored head; do
        nothing if ``name`` is another tensor.

        The head is read in blocks of rows. Bits are compared, so that NaN equals itself.

        Raises:
            DataError: the head differs.
        """
        if not self._stored or name != EMBEDDING:
            return
        rows, *columns = region
        step = max(1, BUFFER_BYTES // max(1, read[:1].nbytes))
        for start in range(rows.start, rows.stop, step):
            block = slice(start, min(start + step, rows.stop))
            embedding = read[block.start - rows.start : block.stop - rows.start]
            if not torch.equal(embedding.view(torch.uint8), read_head((block, *columns)).view(torch.uint8)):
                raise DataError(self._error)
