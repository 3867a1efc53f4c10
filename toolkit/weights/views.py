"""Views of weight sources (another dtype, vocabulary or subset), and checks and file layouts of tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from toolkit.io.tensor_file import new_output, whole
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING, HEAD
from toolkit.models.meta_decoder import buffer_dtype
from toolkit.models.parameters import parameter_shapes, table
from toolkit.weights.source import Region, StoredTensor, WeightSource, reject_mismatches


class View:
    """A view of another source; everything that is not overridden is unchanged. ``extra_paths`` are
    additional paths that it reads."""

    extra_paths: tuple[Path, ...] = ()

    def __init__(self, base: WeightSource):
        self.base = base
        self.place = base.place
        self.args = base.args
        self.tensors: Mapping[str, StoredTensor] = base.tensors

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        return self.base.read(name, region, out)


def origin(source: WeightSource) -> WeightSource:
    """Return the original source, from which all views derive."""
    while isinstance(source, View):
        source = source.base
    return source


def note_of(source: WeightSource) -> str:
    """Return the source's note for the user, or ""."""
    return getattr(origin(source), "note", "")


def source_paths(source: WeightSource) -> list[Path]:
    """Return every path from which ``source`` is read."""
    return [*source_paths(source.base), *source.extra_paths] if isinstance(source, View) else [source.place]


class Cast(View):
    """A view with parameters in ``dtype`` and buffers in at least fp32, as in published weights."""

    def __init__(self, base: WeightSource, dtype: torch.dtype):
        super().__init__(base)
        buffers = {name for name, row in table(base.args).items() if row.buffer}
        dtypes = {name: buffer_dtype(dtype) if name in buffers else dtype for name in base.tensors}
        self.tensors = {name: replace(it, dtype=dtypes[name]) for name, it in base.tensors.items()}

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        dtype = self.tensors[name].dtype
        if self.base.tensors[name].dtype == dtype:
            return self.base.read(name, region, out)
        cast = self.base.read(name, region).to(dtype)
        return cast if out is None else out.copy_(cast)


class WithArgs(View):
    """A view with model args that differ from those stored with the weights."""

    def __init__(self, base: WeightSource, args: ModelArgs):
        super().__init__(base)
        self.args = args


class Subset(View):
    """A view with only the tensors in ``names``."""

    def __init__(self, base: WeightSource, names: Collection[str]):
        super().__init__(base)
        self.tensors = {name: stored for name, stored in base.tensors.items() if name in names}


class Resized(View):
    """A view with ``vocab_size`` rows in the embedding and the LM head. New rows are the mean of the old
    rows, so that an untrained token is as likely as an average one."""

    def __init__(self, base: WeightSource, vocab_size: int):
        super().__init__(base)
        self.args = replace(base.args, vocab_size=vocab_size)
        resized = {EMBEDDING} if base.args.classifier else {EMBEDDING, HEAD}
        self.tensors = {
            name: replace(stored, shape=(vocab_size, *stored.shape[1:])) if name in resized else stored
            for name, stored in base.tensors.items()
        }
        self._lock = Lock()

    @cached_property
    def _means(self) -> dict[str, Tensor]:
        """Means of the old rows, summed in fp64, one block of rows at a time."""
        means = {}
        for name in {EMBEDDING, HEAD} & self.base.tensors.keys():
            (rows, width), dtype = self.base.tensors[name].shape, self.base.tensors[name].dtype
            total = torch.zeros(width, dtype=torch.float64)
            for start in range(0, rows, 4096):
                block = self.base.read(name, (slice(start, min(rows, start + 4096)), slice(0, width)))
                total += block.sum(0, dtype=torch.float64)
            means[name] = (total / rows).to(dtype)
        return means

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        before, after = self.base.tensors[name], self.tensors[name]
        if after == before:
            return self.base.read(name, region, out)
        region = whole(after.shape) if region is None else region
        out = new_output(after.shape, after.dtype, region, out)
        rows, columns = region
        old = max(0, min(rows.stop, before.shape[0]) - rows.start)
        if old:
            out[:old].copy_(self.base.read(name, (slice(rows.start, rows.start + old), columns)))
        if old < len(out):
            with self._lock:
                mean = self._means[name]
            out[old:] = mean[columns]
        return out


def in_order(source: WeightSource) -> dict[str, StoredTensor]:
    """Return the tensors in the model's order, so that equal models produce equal files."""
    order = {name: index for index, name in enumerate(parameter_shapes(source.args))}
    return dict(sorted(source.tensors.items(), key=lambda item: order.get(item[0], len(order))))


def split_into_files(tensors: Mapping[str, StoredTensor], max_bytes: int) -> list[dict[str, StoredTensor]]:
    """Split tensors, in order, into files of at most ``max_bytes``; 0 means a single file."""
    files: list[dict[str, StoredTensor]] = [{}]
    size = 0
    for name, stored in tensors.items():
        if max_bytes and files[-1] and size + stored.nbytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = stored
        size += stored.nbytes
    return files


def check_complete(source: WeightSource) -> None:
    """Compare the tensors of ``source`` with the model of its args.

    Raises:
        DataError: tensors are missing, unexpected, of another shape or not floating-point; all are reported
            by name.
    """
    expected = parameter_shapes(source.args)
    stored = source.tensors
    problems = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [name for name in stored if name not in expected],
        "of another shape": [
            f"{name} {stored[name].shape} instead of {shape}"
            for name, shape in expected.items()
            if name in stored and stored[name].shape != shape
        ],
        "not floating-point": [
            f"{name} {str(it.dtype).removeprefix('torch.')}"
            for name, it in stored.items()
            if not it.dtype.is_floating_point
        ],
    }
    reject_mismatches(source.place, problems)
