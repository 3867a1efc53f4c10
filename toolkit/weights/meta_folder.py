"""Meta folders as weight sources: params.json and consolidated.NN.pth, one file per tensor-parallel rank.

Each file has a slice of every matrix, by rows or by columns, and complete norms. Regions are joined while
being read. Pickles are loaded with torch's ``weights_only`` to the meta device. This reads names, shapes and
file offsets, but no elements.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.config.local_paths import open_regular
from toolkit.errors import DataError, first_few
from toolkit.io.tensor_file import BUFFER_BYTES, SavedFile, TensorPlace, new_output, read_region, whole
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import EMBEDDING, HEAD, NORM, head_rows
from toolkit.models.common.spec import PARAMS
from toolkit.models.on_disk import read_meta_params
from toolkit.models.parameters import table
from toolkit.weights.safetensors_header import ignored_note
from toolkit.weights.source import Region, StoredTensor, TiedHead

_NO_WEIGHT = "rope.freqs"
_AXIS = {"column": 0, "head": 0, "row": 1}
"""Sharded dimension by tensor-parallel style; other tensors are replicated in every file."""
_BEFORE_ZIP = b"\x80\x02\x8a\n"
"""First bytes of files written by torch before 1.6."""
_SHOWN = 5  # maximum number of names in a message


@dataclass(frozen=True)
class _ShardedTensor:
    """A tensor in ``shards``, concatenated along ``axis``."""

    shards: Sequence[TensorPlace]
    axis: int

    @property
    def stored(self) -> StoredTensor:
        shape = list(self.shards[0].shape)
        if len(self.shards) > 1:
            shape[self.axis] = sum(shard.shape[self.axis] for shard in self.shards)
        return StoredTensor(tuple(shape), self.shards[0].dtype)


class MetaFolder:
    """A :class:`toolkit.weights.source.WeightSource` with any number of files.

    If there are more files than key/value heads, as in the 405B model with 16 files, adjacent files have the
    same head, and only one of them is read. ``note`` reports stored tensors that are ignored.

    Raises:
        DataError: the folder is missing, of another model, or damaged.
    """

    def __init__(self, place: Path):
        self.place = place
        files = [_read_file(path) for path in _list_files(place)]
        _check_names(place, files)
        first = files[0]
        buffers = {name: it.dtype for name, it in first.items() if not it.dtype.is_floating_point}
        weights = [name for name in first if name not in buffers]
        if not all(file[name].shape for file in files for name in weights):
            raise DataError(f"{place} is not a supported model: it has scalars among its tensors")
        if EMBEDDING not in first or NORM not in first:
            raise DataError(f"{place} is not a supported model: {EMBEDDING} or {NORM} is missing")
        by_rows = first[EMBEDDING].shape[-1:] == first[NORM].shape  # newer releases, or a single file
        embedding = _ShardedTensor([file[EMBEDDING] for file in files], 0 if by_rows else 1)
        self.args = read_meta_params(place, vocab_size=embedding.stored.shape[0])
        self.note = ignored_note(place, buffers, first, table(self.args))
        sharded = {name: _join(name, [file[name] for file in files], self.args) for name in weights}
        self._sharded = sharded | {EMBEDDING: embedding}
        self._check_shapes()
        stored = {name: tensor.stored for name, tensor in self._sharded.items()}
        self._tied_head = TiedHead(self, stored, key="tied_embeddings", config=PARAMS)
        self.tensors: Mapping[str, StoredTensor] = self._tied_head.tensors

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        tensor = self._sharded[name]
        shape, dtype = tensor.stored.shape, tensor.stored.dtype
        region = whole(shape) if region is None else region
        out = new_output(shape, dtype, region, out)
        self._read(tensor, region, out)
        if self._sharded.get(HEAD) != tensor:  # torch may have stored both names once
            self._tied_head.check(name, region, out, partial(self.read, HEAD))
        return out

    def _read(self, tensor: _ShardedTensor, region: Region, out: Tensor) -> None:
        if len(tensor.shards) == 1:
            read_region(tensor.shards[0], region, out)
            return
        axis, end = tensor.axis, 0
        for shard in tensor.shards:
            begin, end = end, end + shard.shape[axis]
            start, stop = max(begin, region[axis].start), min(end, region[axis].stop)
            if start < stop:
                within = list(region)
                within[axis] = slice(start - begin, stop - begin)
                _read_shard(shard, within, out.narrow(axis, start - region[axis].start, stop - start))

    def _check_shapes(self) -> None:
        """Reject shards whose dtypes differ, or whose sizes differ in an unsharded dimension."""
        wrong = []
        for name, tensor in self._sharded.items():
            kinds = {(shard.dtype, _without(shard.shape, tensor.axis)) for shard in tensor.shards}
            if len(kinds) > 1:
                wrong.append(f"{name}: {', '.join(str(shard.shape) for shard in tensor.shards)}")
        if wrong:
            raise DataError(f"the files in {self.place} do not match one another: {first_few(wrong, _SHOWN)}")


def _read_shard(shard: TensorPlace, region: Region, out: Tensor) -> None:
    """Read a region into a possibly non-contiguous view, through a buffer of rows."""
    if out.is_contiguous():
        read_region(shard, region, out)
        return
    rows, width = region[0], out.shape[1]
    step = max(1, BUFFER_BYTES // (width * shard.dtype.itemsize))
    buffer = torch.empty((min(step, len(out)), width), dtype=shard.dtype)
    for start in range(0, len(out), step):
        block = buffer[: min(step, len(out) - start)]
        read_region(shard, (slice(rows.start + start, rows.start + start + len(block)), region[1]), block)
        out[start : start + len(block)].copy_(block)


def _join(name: str, shards: list[TensorPlace], args: ModelArgs) -> _ShardedTensor:
    row = table(args).get(name) or (head_rows(args)[0] if name == HEAD else None)
    axis = _AXIS.get(row.tensor_parallel or "") if row else None
    if axis is not None and any(len(shard.shape) != 2 for shard in shards):
        raise DataError(f"{shards[0].file.parent} has {name}, which must be a matrix, in another shape")
    if axis is None:
        return _ShardedTensor(shards[:1], 0)
    if axis == 1:
        return _ShardedTensor(shards, 1)
    if name.endswith(("wk.weight", "wv.weight")):
        copies = len(shards) * shards[0].shape[0] // (args.n_kv_heads * args.head_dim)
        shards = shards[:: max(1, copies)]
    return _ShardedTensor(shards, 0)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _list_files(folder: Path) -> list[Path]:
    """Return consolidated.00.pth, consolidated.01.pth, …; no number may be missing."""
    found = sorted(folder.glob("consolidated.*.pth"))
    if not found:
        raise DataError(f"{folder} has no weights: there is no consolidated.00.pth")
    expected = [folder / f"consolidated.{index:02}.pth" for index in range(len(found))]
    missing = [path.name for path in expected if path not in found]
    if missing:
        raise DataError(f"{folder} lacks files of the model: {first_few(missing, _SHOWN)}")
    return expected


def _check_names(folder: Path, files: Sequence[Mapping[str, TensorPlace]]) -> None:
    names = set().union(*files)
    missing = [
        f"{name} in file {index:02}" for index, file in enumerate(files) for name in sorted(names - set(file))
    ]
    if missing:
        raise DataError(f"{folder} lacks tensors: {first_few(missing, _SHOWN)}")


def _read_file(path: Path) -> dict[str, TensorPlace]:
    try:
        with open_regular(path) as stream:
            if stream.read(len(_BEFORE_ZIP)) == _BEFORE_ZIP:
                raise DataError(f"{path} has torch's old format: save it again with a newer torch")
            saved = SavedFile(path, stream)
            content = saved.load()
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} contains other objects than tensors and is not loaded: {error}") from None
    except Exception as error:  # the type of torch's exception depends on the damage
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} is damaged or truncated: {reason}") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise DataError(f"{path} does not contain a dictionary of tensors by name")
    return {name: _place(saved, path, name, tensor) for name, tensor in content.items() if name != _NO_WEIGHT}


def _place(saved: SavedFile, path: Path, name: str, tensor: Any) -> TensorPlace:
    if not isinstance(tensor, Tensor):
        raise DataError(f"{path} has {name} as {type(tensor).__name__}; weights must be tensors")
    try:
        return saved.place(tensor)
    except ValueError as error:
        raise DataError(f"{path} has {name} in an unsupported layout: {error}") from None
