"""Weights as they would be in another dtype or with another vocabulary, and whether they are all there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from toolkit.errors import DataError, first_few
from toolkit.io.tensor_file import new_output, whole
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.table import EMBEDDING, HEAD
from toolkit.models.parameters import parameter_shapes
from toolkit.weights.source import Region, Stored, WeightSource

_SHOWN = 20


class View:
    """Another source's weights; what is not overridden is as there. ``beside`` are places that are read with
    its own."""

    beside: tuple[Path, ...] = ()

    def __init__(self, base: WeightSource):
        self.base = base
        self.place = base.place
        self.args = base.args
        self.tensors: Mapping[str, Stored] = base.tensors

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        return self.base.read(name, region, out)


def origin(source: WeightSource) -> WeightSource:
    """Return the source that a view, or a view of one, is of."""
    while isinstance(source, View):
        source = source.base
    return source


def note_of(source: WeightSource) -> str:
    """Return what a user should know of the weights; "" where that is nothing."""
    return getattr(origin(source), "note", "")


def places(source: WeightSource) -> list[Path]:
    """Every place that ``source`` is read from: that of its origin, and those beside it."""
    return [*places(source.base), *source.beside] if isinstance(source, View) else [source.place]


class Cast(View):
    """Every tensor in ``dtype``."""

    def __init__(self, base: WeightSource, dtype: torch.dtype):
        super().__init__(base)
        self.dtype = dtype
        self.tensors = {name: replace(stored, dtype=dtype) for name, stored in base.tensors.items()}

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        if self.base.tensors[name].dtype == self.dtype:
            return self.base.read(name, region, out)
        cast = self.base.read(name, region).to(self.dtype)
        return cast if out is None else out.copy_(cast)


class Shaped(View):
    """Tensors of a model of ``args``, which may be other than those that are told beside the weights."""

    def __init__(self, base: WeightSource, args: ModelArgs):
        super().__init__(base)
        self.args = args


class Only(View):
    """The tensors ``names`` alone."""

    def __init__(self, base: WeightSource, names: Collection[str]):
        super().__init__(base)
        self.tensors = {name: stored for name, stored in base.tensors.items() if name in names}


class Resized(View):
    """With ``vocab_size`` rows in the embedding and a language model's head: the first ones, then the mean of
    all that are there, which makes a token that was never trained as likely as the average one."""

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
        """Means of the rows that are there, summed in fp64 a block of rows at a time."""
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
        there, here = self.base.tensors[name], self.tensors[name]
        if here == there:
            return self.base.read(name, region, out)
        region = whole(here.shape) if region is None else region
        out = new_output(here.shape, here.dtype, region, out)
        rows, columns = region
        old = max(0, min(rows.stop, there.shape[0]) - rows.start)
        if old:
            out[:old].copy_(self.base.read(name, (slice(rows.start, rows.start + old), columns)))
        if old < len(out):
            with self._lock:
                mean = self._means[name]
            out[old:] = mean[columns]
        return out


def in_order(source: WeightSource) -> dict[str, Stored]:
    """The tensors in the model's order, whatever that on disk is, so that equal models make equal files."""
    places = {name: place for place, name in enumerate(parameter_shapes(source.args))}
    found = source.tensors.items()
    return dict(sorted(found, key=lambda item: places.get(item[0], len(places))))


def cut_into_files(tensors: Mapping[str, Stored], max_bytes: int) -> list[dict[str, Stored]]:
    """The tensors of each file, in order; a file is full before the next begins. 0 is one file."""
    files: list[dict[str, Stored]] = [{}]
    size = 0
    for name, stored in tensors.items():
        if max_bytes and files[-1] and size + stored.nbytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = stored
        size += stored.nbytes
    return files


def check_complete(source: WeightSource) -> None:
    """Compare the tensors of ``source`` with those of a model of its shape.

    Raises:
        DataError: some are missing, too many, of another shape or not floating-point; each by name.
    """
    expected = parameter_shapes(source.args)
    stored = source.tensors
    problems = {
        "missing": [name for name in expected if name not in stored],
        "of no such model": [name for name in stored if name not in expected],
        "of another shape": [
            f"{name} {stored[name].shape} in place of {shape}"
            for name, shape in expected.items()
            if name in stored and stored[name].shape != shape
        ],
        "no weights, by their type": [
            f"{name} {str(it.dtype).removeprefix('torch.')}"
            for name, it in stored.items()
            if not it.dtype.is_floating_point
        ],
    }
    lines = [f"{what}: {first_few(names, _SHOWN)}" for what, names in problems.items() if names]
    if lines:
        raise DataError(
            "\n  ".join([f"{source.place} does not hold the model that its config tells of:", *lines])
        )
