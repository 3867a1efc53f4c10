"""Hugging Face folders as weight sources: config.json, safetensors files and their index."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from toolkit.io.tensor_file import TensorPlace, new_output, read_region, whole
from toolkit.models.common.parameter_table import HEAD
from toolkit.models.common.spec import CONFIG
from toolkit.models.on_disk import read_hf_config
from toolkit.models.parameters import table
from toolkit.weights.safetensors_header import model_entries
from toolkit.weights.source import Region, StoredTensor, TiedHead

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsFolder:
    """A :class:`toolkit.weights.source.WeightSource`. ``note`` reports stored tensors that are ignored.

    Raises:
        DataError: the folder is missing, of an unknown model, or damaged.
    """

    def __init__(self, place: Path):
        self.place = place
        self.args = read_hf_config(place)
        self._places: dict[str, TensorPlace] = {}
        entries, self.note = model_entries(place, self.args)
        for hf_name, entry in entries.items():
            name = table(self.args).from_hf(hf_name)
            assert name is not None
            self._places[name] = TensorPlace(entry.file, entry.begin, entry.shape, _DTYPES[entry.dtype])
        stored = {name: StoredTensor(place.shape, place.dtype) for name, place in self._places.items()}
        self._tied_head = TiedHead(self, stored, key="tie_word_embeddings", config=CONFIG)
        self.tensors: Mapping[str, StoredTensor] = self._tied_head.tensors

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        place = self._places[name]
        region = whole(place.shape) if region is None else region
        out = new_output(place.shape, place.dtype, region, out)
        row = table(self.args).get(name)
        read_region(place, region, out, paired_rows=row.rotary if row else 0)
        self._tied_head.check(name, region, out, partial(self.read, HEAD))
        return out
