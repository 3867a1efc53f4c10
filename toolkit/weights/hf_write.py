"""Write Hugging Face folders: safetensors files of at most 5 GB, their index, and the configs.

The dtype is the source's; :class:`toolkit.weights.views.Cast` changes it. Each rank writes entire files, one
at a time in memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from toolkit.distributed.agreement import Ranks
from toolkit.io.tensor_file import Region, whole
from toolkit.launcher.environment import threads
from toolkit.models.common.hf_config import GENERATION_CONFIG, generation_config_json
from toolkit.models.common.parameter_table import hf_row_order
from toolkit.models.common.spec import CONFIG
from toolkit.models.parameters import table
from toolkit.models.registry import spec
from toolkit.weights.folder_write import Folder, Progress, no_progress, write_folder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.safetensors_header import INDEX, SINGLE
from toolkit.weights.source import StoredTensor, WeightSource
from toolkit.weights.views import View, in_order, split_into_files

MAX_BYTES = 5 * 10**9


@dataclass(frozen=True)
class SpecialTokens:
    """Ids for config.json: BOS, EOS (one or several) and padding."""

    bos: int | None = None
    eos: int | list[int] | None = None
    pad: int | None = None


def write_hf(
    source: WeightSource,
    out: Path,
    *,
    tokens: SpecialTokens,
    others: Mapping[str, bytes],
    ranks: Ranks,
    max_bytes: int = MAX_BYTES,
    progress: Progress = no_progress,
    check: Callable[[WeightSource], None] | None = None,
    replace: bool = False,
) -> None:
    """Write ``source`` as a Hugging Face folder ``out``, with the files ``others`` (the tokenizer).

    The other arguments are those of :func:`toolkit.weights.folder_write.write_folder`.
    """
    published = Published(source)
    files = published.files(max_bytes)
    folder = Folder(
        files=files,
        others=_configs(source, tokens) | (_index(published, files) if len(files) > 1 else {}) | dict(others),
        write=partial(_save, published, progress),
        open=SafetensorsFolder,
    )
    write_folder(published, out, folder, ranks=ranks, progress=progress, check=check, replace=replace)


class Published(View):
    """A view of the tensors of a Hugging Face folder: by their names there, in the model's order, with one
    matrix per expert, and with Hugging Face's order of rows in each head. Each tensor is read as a whole."""

    def __init__(self, base: WeightSource):
        super().__init__(base)
        self._rows = table(base.args)
        tensors: dict[str, StoredTensor] = {}
        for name, stored in in_order(base).items():
            row = self._rows[name]
            shape = row.hf_shape if row.experts else stored.shape
            tensors |= dict.fromkeys(row.hf_names, StoredTensor(shape, stored.dtype))
        self.tensors = tensors

    def files(self, max_bytes: int) -> dict[str, list[str]]:
        """Return the tensors of each file, by file name."""
        shards = split_into_files(self.tensors, max_bytes)
        return dict(zip(_shard_names(len(shards)), map(list, shards), strict=True))

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        assert region is None and out is None
        (ours, index), *others = self._rows.from_hf(name)
        row = self._rows[ours]
        if row.fused:
            fused = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
            for part, _ in ((ours, index), *others):
                layout, size = self._rows[part].fused, self._rows[part].shape[1]
                assert layout is not None
                fused[..., layout.columns(size)] = self.base.read(part).movedim(1, -1)
            return fused
        if row.experts:
            return self.base.read(ours, (slice(index, index + 1), *whole(self.tensors[name].shape)))[0]
        tensor = self.base.read(ours)
        if head_dim := row.rotary:
            order = hf_row_order(range(len(tensor)), head_dim)
            tensor = tensor.index_select(0, torch.tensor(order))
        return tensor


def generation_config(tokens: SpecialTokens) -> dict[str, bytes]:
    """Return generation_config.json with the ids that are set; empty if none is set."""
    ids = generation_config_json(**asdict(tokens))
    return {GENERATION_CONFIG: _json(ids)} if ids else {}


def _shard_names(count: int) -> list[str]:
    """Return the names of ``count`` safetensors files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _save(source: Published, progress: Progress, path: Path, names: Sequence[str]) -> None:
    """Write one file from memory; several threads read its tensors."""

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        progress(tensor.nbytes)
        return tensor

    with ThreadPoolExecutor(threads()) as pool:
        tensors = dict(zip(names, pool.map(read, names), strict=True))
    save_file(tensors, path, metadata={"format": "pt"})


def _index(source: Published, files: Mapping[str, Sequence[str]]) -> dict[str, bytes]:
    weight_map = {name: file for file, names in files.items() for name in names}
    total = sum(stored.nbytes for stored in source.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return {INDEX: _json(index)}


def _configs(source: WeightSource, tokens: SpecialTokens) -> dict[str, bytes]:
    [(dtype, _)] = Counter(stored.dtype for stored in source.tensors.values()).most_common(1)
    name = str(dtype).removeprefix("torch.")
    return {
        CONFIG: _json(spec(source.args.family).hf_config().write(source.args, dtype=name, **asdict(tokens))),
        **generation_config(tokens),
    }


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
