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
from toolkit.launcher.environment import threads
from toolkit.models.common.hf_config import GENERATION_CONFIG, generation_config_json
from toolkit.models.common.parameter_table import hf_row_order
from toolkit.models.common.spec import CONFIG
from toolkit.models.parameters import table
from toolkit.models.registry import spec
from toolkit.weights.folder_write import Folder, Progress, no_progress, write_folder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.safetensors_header import INDEX, SINGLE
from toolkit.weights.source import WeightSource
from toolkit.weights.views import in_order, split_into_files

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
    shards = split_into_files(in_order(source), max_bytes)
    files = dict(zip(shard_names(len(shards)), map(list, shards), strict=True))
    folder = Folder(
        files=files,
        others=_configs(source, tokens) | (_index(source, files) if len(files) > 1 else {}) | dict(others),
        write=partial(_save, source, progress),
        open=SafetensorsFolder,
    )
    write_folder(source, out, folder, ranks=ranks, progress=progress, check=check, replace=replace)


def generation_config(tokens: SpecialTokens) -> dict[str, bytes]:
    """Return generation_config.json with the ids that are set; empty if none is set."""
    ids = generation_config_json(**asdict(tokens))
    return {GENERATION_CONFIG: _json(ids)} if ids else {}


def shard_names(count: int) -> list[str]:
    """Return the names of ``count`` safetensors files."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _save(source: WeightSource, progress: Progress, path: Path, names: Sequence[str]) -> None:
    """Write one file from memory; several threads read its tensors."""
    rows = table(source.args)

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        if head_dim := rows[name].rotary:
            order = hf_row_order(range(len(tensor)), head_dim)
            tensor = tensor.index_select(0, torch.tensor(order))
        progress(tensor.nbytes)
        return tensor

    with ThreadPoolExecutor(threads()) as pool:
        tensors = dict(zip(map(rows.to_hf, names), pool.map(read, names), strict=True))
    save_file(tensors, path, metadata={"format": "pt"})


def _index(source: WeightSource, files: Mapping[str, Sequence[str]]) -> dict[str, bytes]:
    to_hf = table(source.args).to_hf
    weight_map = {to_hf(name): file for file, names in files.items() for name in names}
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
