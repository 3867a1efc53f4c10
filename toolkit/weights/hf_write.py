"""Writes a Hugging Face folder: safetensors files of at most 5 GB with their index, and the configs.

The dtype is the source's: :class:`toolkit.weights.views.Cast` changes it. The ranks of ``ranks`` write whole
files each, so that they need share no more than a file system.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.distributed.agreement import Ranks
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.hf_config import CONFIG, GENERATION_CONFIG, generation_config_json
from toolkit.models.common.state_dict_adapter import StateDictAdapter, hf_row_order
from toolkit.models.registry import spec
from toolkit.weights.fill import File, Folder, write_folder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.safetensors_header import INDEX, SINGLE
from toolkit.weights.source import Stored, WeightSource
from toolkit.weights.views import in_order

MAX_BYTES = 5 * 10**9
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that config.json tells: what begins, ends (all that end) and fills a text."""

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
    progress: Callable[[int], None] | None = None,
    check: Callable[[WeightSource], None] | None = None,
    replace: bool = False,
) -> None:
    """Write ``source`` as a Hugging Face folder ``out``, with ``others`` (the tokenizer) beside the weights.

    For the rest see :func:`toolkit.weights.fill.write_folder`.
    """
    shards = plan_shards(in_order(source), max_bytes)
    names = shard_names(len(shards))
    head_dim, adapter = source.args.head_dim, spec(source.args.family).adapter
    folder = Folder(
        files=[_file(adapter, name, shard) for name, shard in zip(names, shards, strict=True)],
        others=_configs(source, tokens)
        | (_index(adapter, names, shards) if len(shards) > 1 else {})
        | dict(others),
        opened=SafetensorsFolder,
        arrange=partial(_arrange, source.args),
        head_rows=lambda name: head_dim if adapter.reorders_rows(name) else 1,
    )
    write_folder(source, out, folder, ranks=ranks, progress=progress, check=check, replace=replace)


def generation_config(tokens: SpecialTokens) -> dict[str, bytes]:
    """generation_config.json with the ids that there are; no file where there are none."""
    ids = generation_config_json(**asdict(tokens))
    return {GENERATION_CONFIG: _json(ids)} if ids else {}


def plan_shards(tensors: Mapping[str, Stored], max_bytes: int) -> list[dict[str, Stored]]:
    """The tensors of each file, in order; a file is full before the next begins."""
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, stored in tensors.items():
        if shards[-1] and size + _bytes(stored) > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = stored
        size += _bytes(stored)
    return shards


def shard_names(count: int) -> list[str]:
    """What the files are called."""
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _bytes(stored: Stored) -> int:
    return torch.Size(stored.shape).numel() * stored.dtype.itemsize


def _arrange(args: ModelArgs, name: str, block: Tensor) -> Tensor:
    if not spec(args.family).adapter.reorders_rows(name):
        return block
    return block.index_select(0, torch.tensor(hf_row_order(range(len(block)), args.head_dim)))


def _file(adapter: StateDictAdapter, name: str, shard: Mapping[str, Stored]) -> File:
    """Wider types first, so that each value lies where its size divides its place."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for ours, stored in sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize):
        begins[ours], begin, end = end, end, end + _bytes(stored)
        shape = list(stored.shape)
        about = {"dtype": _DTYPES[stored.dtype], "shape": shape, "data_offsets": [begin, end]}
        header[adapter.to_hf(ours)] = about
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(start + end)

    return File(
        name, list(begins), make, lambda path: {ours: start + begin for ours, begin in begins.items()}
    )


def _index(adapter: StateDictAdapter, names: list[str], shards: list[dict[str, Stored]]) -> dict[str, bytes]:
    weight_map = {
        adapter.to_hf(ours): name for name, shard in zip(names, shards, strict=True) for ours in shard
    }
    total = sum(_bytes(stored) for shard in shards for stored in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return {INDEX: _json(index)}


def _configs(source: WeightSource, tokens: SpecialTokens) -> dict[str, bytes]:
    [(dtype, _)] = Counter(stored.dtype for stored in source.tensors.values()).most_common(1)
    name = str(dtype).removeprefix("torch.")
    return {
        CONFIG: _json(spec(source.args.family).hf_config.write(source.args, dtype=name, **asdict(tokens))),
        **generation_config(tokens),
    }


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
