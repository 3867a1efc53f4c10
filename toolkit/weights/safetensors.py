"""Hugging Face folders as weight sources: config.json, safetensors files and their index."""

from __future__ import annotations

from collections import Counter
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
from toolkit.weights.block_fp8 import DEQUANTIZED, read_block_fp8
from toolkit.weights.fused_experts import read_fused
from toolkit.weights.safetensors_header import FP4, FP8, Entry, model_entries
from toolkit.weights.source import Region, StoredTensor, TiedHead, reject_mismatches

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    FP8: torch.float8_e4m3fn, FP4: torch.uint8, "U8": torch.uint8,
}  # fmt: skip


class SafetensorsFolder:
    """A :class:`toolkit.weights.source.WeightSource`. ``note`` reports stored tensors that are ignored.

    Experts are stacked while being read, each from its own matrix in the files or from fused tensors, and
    weights in fp8 and MXFP4 are dequantized to bf16.

    Raises:
        DataError: the folder is missing, of an unknown model, or damaged; or experts that belong to one
            tensor are missing or differ in shape or dtype.
    """

    def __init__(self, place: Path):
        self.place = place
        self.args = read_hf_config(place)
        self._places: dict[str, dict[int, TensorPlace]] = {}
        self._scales: dict[str, dict[int, TensorPlace]] = {}
        entries, self.note = model_entries(place, self.args)
        for hf_name, entry in entries.items():
            for name, expert in table(self.args).from_hf(hf_name):
                matrices = self._places.setdefault(name, {})
                matrices[expert] = _place(entry)
                if entry.scales is not None:
                    self._scales.setdefault(name, {})[expert] = _place(entry.scales)
        self._check_experts()
        self._stored = {name: self._stack(name, matrices[0]) for name, matrices in self._places.items()}
        self._tied_head = TiedHead(self, self._stored, key="tie_word_embeddings", config=CONFIG)
        self.tensors: Mapping[str, StoredTensor] = self._tied_head.tensors

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        stored, row = self._stored[name], table(self.args).get(name)
        region = whole(stored.shape) if region is None else region
        out = new_output(stored.shape, stored.dtype, region, out)
        if row is not None and row.fused is not None:
            scales = self._scales.get(name, {}).get(0)
            read_fused(self._places[name][0], scales, row.fused, row.shape[1], region, out)
        elif row is not None and row.experts:
            experts, *inside = region
            for expert, matrix in zip(range(experts.start, experts.stop), out, strict=True):
                self._read(name, expert, inside, matrix)
        else:
            self._read(name, 0, region, out, paired_rows=row.rotary if row else 0)
        self._tied_head.check(name, region, out, partial(self.read, HEAD))
        return out

    def _read(self, name: str, expert: int, region: Region, out: Tensor, paired_rows: int = 0) -> None:
        place = self._places[name][expert]
        if name in self._scales:
            read_block_fp8(place, self._scales[name][expert], region, out)
        else:
            read_region(place, region, out, paired_rows=paired_rows)

    def _stack(self, name: str, first: TensorPlace) -> StoredTensor:
        row = table(self.args).get(name)
        dtype = DEQUANTIZED if name in self._scales else first.dtype
        if row and row.fused:
            return StoredTensor(row.shape, dtype)
        experts = (row.experts,) if row and row.experts else ()
        return StoredTensor((*experts, *first.shape), dtype)

    def _check_experts(self) -> None:
        """Reject experts that cannot be stacked. A tensor without stored experts is rejected when read."""
        missing, shapes, dtypes = [], [], []
        for name, matrices in self._places.items():
            row = table(self.args).get(name)
            if row is None or not row.experts:
                continue
            [(dtype, _)] = Counter(matrix.dtype for matrix in matrices.values()).most_common(1)
            for expert, hf_name in enumerate(row.hf_names):
                if (matrix := matrices.get(expert)) is None:
                    missing.append(hf_name)
                elif matrix.shape != row.hf_shape:
                    shapes.append(f"{hf_name} {matrix.shape} instead of {row.hf_shape}")
                elif matrix.dtype != dtype:
                    dtypes.append(f"{hf_name} {matrix.dtype} instead of {dtype}".replace("torch.", ""))
        problems = {"missing": missing, "of another shape": shapes, "of another dtype": dtypes}
        reject_mismatches(self.place, problems)


def _place(entry: Entry) -> TensorPlace:
    return TensorPlace(entry.file, entry.begin, entry.shape, _DTYPES[entry.dtype])
