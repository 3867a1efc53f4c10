"""A Meta folder as a source of weights: params.json and consolidated.NN.pth, the parts of tensor parallelism.

Each part has a slice of every matrix, by rows or by columns, and all of the norms. The parts are joined
region by region as they are read. Their pickles are loaded by torch's ``weights_only``, onto the meta device:
that reads names, shapes and places, and no weight.
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
from toolkit.models.common.spec import PARAMS
from toolkit.models.common.table import EMBEDDING, HEAD, NORM, head_rows
from toolkit.models.on_disk import read_meta_params
from toolkit.models.parameters import table
from toolkit.weights.safetensors_header import ignored
from toolkit.weights.source import Region, Stored, TiedHead

_NO_WEIGHT = "rope.freqs"
_AXIS = {"column": 0, "head": 0, "row": 1}
"""The dimension that tensor parallelism cuts, by its style; other tensors are in every part whole."""
_BEFORE_ZIP = b"\x80\x02\x8a\n"
"""First bytes of files of torch before 1.6."""
_SHOWN = 5


@dataclass(frozen=True)
class _Joined:
    """A tensor in ``pieces``, one after the other along ``axis``."""

    pieces: Sequence[TensorPlace]
    axis: int

    @property
    def stored(self) -> Stored:
        shape = list(self.pieces[0].shape)
        if len(self.pieces) > 1:
            shape[self.axis] = sum(piece.shape[self.axis] for piece in self.pieces)
        return Stored(tuple(shape), self.pieces[0].dtype)


class MetaFolder:
    """See :class:`toolkit.weights.source.WeightSource`. Any number of parts.

    Where there are more parts than key/value heads, as in the 405B of 16 parts, neighbours hold the same
    head, and one of them counts. ``note`` tells of what is stored and ignored.

    Raises:
        DataError: the folder is not there, is of another model, or is damaged.
    """

    def __init__(self, place: Path):
        self.place = place
        parts = [_read_part(path) for path in _part_files(place)]
        _check_alike(place, parts)
        first = parts[0]
        buffers = {name: it.dtype for name, it in first.items() if not it.dtype.is_floating_point}
        weights = [name for name in first if name not in buffers]
        if not all(part[name].shape for part in parts for name in weights):
            raise DataError(f"{place} is of no such model: it holds numbers beside tensors")
        if EMBEDDING not in first or NORM not in first:
            raise DataError(f"{place} is of no such model: {EMBEDDING} or {NORM} is missing")
        by_rows = first[EMBEDDING].shape[-1:] == first[NORM].shape  # newer releases, or a single part
        embedding = _Joined([part[EMBEDDING] for part in parts], 0 if by_rows else 1)
        self.args = read_meta_params(place, vocab_size=embedding.stored.shape[0])
        self.note = ignored(place, buffers, first, table(self.args))
        joined = {name: _join(name, [part[name] for part in parts], self.args) for name in weights}
        self._joined = joined | {EMBEDDING: embedding}
        self._refuse_misfits()
        stored = {name: joined.stored for name, joined in self._joined.items()}
        self._tied_head = TiedHead(self, stored, key="tied_embeddings", config=PARAMS)
        self.tensors: Mapping[str, Stored] = self._tied_head.tensors

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        joined = self._joined[name]
        shape, dtype = joined.stored.shape, joined.stored.dtype
        region = whole(shape) if region is None else region
        out = new_output(shape, dtype, region, out)
        self._read(joined, region, out)
        if self._joined.get(HEAD) != joined:  # which torch may have stored once, under both names
            self._tied_head.check(name, region, out, partial(self.read, HEAD))
        return out

    def _read(self, joined: _Joined, region: Region, out: Tensor) -> None:
        if len(joined.pieces) == 1:
            read_region(joined.pieces[0], region, out)
            return
        axis, end = joined.axis, 0
        for piece in joined.pieces:
            begin, end = end, end + piece.shape[axis]
            start, stop = max(begin, region[axis].start), min(end, region[axis].stop)
            if start < stop:
                within = list(region)
                within[axis] = slice(start - begin, stop - begin)
                _read_piece(piece, within, out.narrow(axis, start - region[axis].start, stop - start))

    def _refuse_misfits(self) -> None:
        """Refuse slices that cannot be joined: of several dtypes, or of other sizes across the cut."""
        wrong = []
        for name, joined in self._joined.items():
            across = {(piece.dtype, _without(piece.shape, joined.axis)) for piece in joined.pieces}
            if len(across) > 1:
                wrong.append(f"{name}: {', '.join(str(piece.shape) for piece in joined.pieces)}")
        if wrong:
            raise DataError(f"the parts in {self.place} do not fit one another: {first_few(wrong, _SHOWN)}")


def _read_piece(piece: TensorPlace, region: Region, out: Tensor) -> None:
    """``read_region`` into a view that need not be contiguous, by a buffer of rows."""
    if out.is_contiguous():
        read_region(piece, region, out)
        return
    rows, width = region[0], out.shape[1]
    step = max(1, BUFFER_BYTES // (width * piece.dtype.itemsize))
    buffer = torch.empty((min(step, len(out)), width), dtype=piece.dtype)
    for start in range(0, len(out), step):
        block = buffer[: min(step, len(out) - start)]
        read_region(piece, (slice(rows.start + start, rows.start + start + len(block)), region[1]), block)
        out[start : start + len(block)].copy_(block)


def _join(name: str, pieces: list[TensorPlace], args: ModelArgs) -> _Joined:
    row = table(args).get(name) or (head_rows(args)[0] if name == HEAD else None)
    axis = _AXIS.get(row.tensor_parallel or "") if row else None
    if axis is not None and any(len(piece.shape) != 2 for piece in pieces):
        raise DataError(f"{pieces[0].file.parent} holds {name}, a matrix, in another shape")
    if axis is None:
        return _Joined(pieces[:1], 0)
    if axis == 1:
        return _Joined(pieces, 1)
    if name.endswith(("wk.weight", "wv.weight")):
        copies = len(pieces) * pieces[0].shape[0] // (args.n_kv_heads * args.head_dim)
        pieces = pieces[:: max(1, copies)]
    return _Joined(pieces, 0)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _part_files(folder: Path) -> list[Path]:
    """consolidated.00.pth, consolidated.01.pth …, of which none may be missing."""
    found = sorted(folder.glob("consolidated.*.pth"))
    if not found:
        raise DataError(f"{folder} has no weights: there is no consolidated.00.pth")
    expected = [folder / f"consolidated.{index:02}.pth" for index in range(len(found))]
    missing = [path.name for path in expected if path not in found]
    if missing:
        raise DataError(f"{folder} lacks parts of the model: {first_few(missing, _SHOWN)}")
    return expected


def _check_alike(folder: Path, parts: Sequence[Mapping[str, TensorPlace]]) -> None:
    names = set().union(*parts)
    lacking = [
        f"{name} in part {index:02}" for index, part in enumerate(parts) for name in sorted(names - set(part))
    ]
    if lacking:
        raise DataError(f"{folder} lacks tensors: {first_few(lacking, _SHOWN)}")


def _read_part(path: Path) -> dict[str, TensorPlace]:
    try:
        with open_regular(path) as stream:
            if stream.read(len(_BEFORE_ZIP)) == _BEFORE_ZIP:
                raise DataError(f"{path} cannot be read in pieces: save it again with a newer torch")
            saved = SavedFile(path, stream)
            found = saved.load()
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} holds more than tensors, and is not loaded: {error}") from None
    except Exception as error:  # what torch raises depends on the damage
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} is damaged, or cut short: {reason}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise DataError(f"{path} holds no dictionary of tensors by name")
    return {name: _place(saved, path, name, tensor) for name, tensor in found.items() if name != _NO_WEIGHT}


def _place(saved: SavedFile, path: Path, name: str, tensor: Any) -> TensorPlace:
    if not isinstance(tensor, Tensor):
        raise DataError(f"{path} holds {name} as {type(tensor).__name__}; weights must be tensors")
    try:
        return saved.place(tensor)
    except ValueError as error:
        raise DataError(f"{path} holds {name} in a form that cannot be read: {error}") from None
