"""Turns weights of one format into another, and compares what came out with what went in."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit import __version__
from toolkit.checkpoint.manifest import step_folder
from toolkit.distributed.agreement import Ranks
from toolkit.errors import DataError, first_few, join_or
from toolkit.finetune.adapter import Adapter
from toolkit.finetune.merge import Merged
from toolkit.finetune.open_adapter import open_adapted, with_adapter
from toolkit.io.work_folder import refuse_existing
from toolkit.launcher.environment import threads
from toolkit.models.parameters import table
from toolkit.models.registry import spec
from toolkit.weights.dcp_write import write_dcp
from toolkit.weights.folder_write import Progress, no_progress
from toolkit.weights.hf_assets import (
    Companions,
    asked_bos,
    run_of,
    special_tokens_of,
    tokenizer_companions,
    tokenizer_of,
)
from toolkit.weights.hf_write import (
    MAX_BYTES,
    SpecialTokens,
    generation_config,
    shard_names,
    write_hf,
)
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.meta_write import PART, write_meta
from toolkit.weights.open import MODEL_PREFIX, CheckpointWeights, open_weights
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource
from toolkit.weights.views import Cast, Resized, check_complete, cut_into_files, in_order, origin

MERGE = "merge"
FORMATS: Mapping[str, type] = {"hf": SafetensorsFolder, "meta": MetaFolder, "dcp": CheckpointWeights}
_STEP = re.compile(r"step-(\d+)")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TOKENIZER_MODEL = "tokenizer.model"
_SHOWN = 8
_AT_ONCE = 4  # tensors, of both sides, that are in memory when they are compared


@dataclass(frozen=True)
class Conversion:
    """``source`` as it will be written to ``out`` in the format ``to``, with ``beside`` it.

    ``there`` is what it is read from, before dtype and vocabulary are changed.
    """

    there: WeightSource
    source: WeightSource
    to: str
    out: Path
    beside: Companions
    max_bytes: int = MAX_BYTES

    @property
    def others(self) -> Mapping[str, bytes]:
        """The files beside the weights. Meta's params.json has no place for the ids of BOS and EOS: they go
        beside it as beside Hugging Face's config.json."""
        files, made = self.beside.files, self.beside.made
        if self.to == "meta":
            kept = {name: content for name, content in files.items() if name not in made}
            return generation_config(self.beside.tokens) | kept
        return files

    @property
    def lacks(self) -> list[str]:
        """Files and ids that readers of the format will look for, and that were nowhere to be found."""
        if self.to == "meta":
            return [] if TOKENIZER_MODEL in self.beside.files else [TOKENIZER_MODEL]
        if self.to == "dcp":
            return []
        ids = {"bos_token_id": self.beside.tokens.bos, "eos_token_id": self.beside.tokens.eos}
        tokenizer = [] if self.beside.files else ["tokenizer"]
        return tokenizer + [key for key, token in ids.items() if token is None]

    @property
    def bytes(self) -> int:
        return sum(stored.nbytes for stored in self.source.tensors.values())


def prepare(
    what: str,
    path: Path,
    out: Path,
    *,
    adapter: Path | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    max_bytes: int = MAX_BYTES,
    hashes: bool = True,
) -> Conversion:
    """Everything that can be found wrong without reading weights; ``what`` is "hf-to-dcp" or the like, or
    "merge", which writes the model at ``path`` with an ``adapter`` as Hugging Face's.

    The checkpoint of an adapter stands for its base with the adapter merged.

    The tokenizer is that of ``tokenizer``, else the one beside the weights, else the one a run was trained
    with. As a checkpoint, ``out`` is a step-N folder or one to hold step-0. ``hashes`` has a checkpoint that
    is read compared with its hashes, before half of a damaged one is converted.

    Raises:
        DataError, CheckpointError: the weights are not there, damaged, of another format or not of the model
            that their config tells of; ``out`` is there already; the tokenizer does not fit.
    """
    path, out = _absolute(path), _absolute(out)
    try:
        there, merged = _opened(what, path, adapter, hashes)
    except PermissionError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    to = "hf" if what == MERGE else what.partition("-to-")[2]
    if to == "meta" and spec(there.args.family).meta_params() is None:
        raise DataError(
            f"{path} is of {spec(there.args.family).hf_config().called}, which Meta's files cannot hold"
        )
    if classifier := there.args.classifier:
        if to == "meta":
            raise DataError(f"{path} is a classifier, which Meta's files cannot hold")
        if to == "hf" and classifier.hidden_sizes:
            raise DataError(
                f"the classifier {path} has hidden layers, {list(classifier.hidden_sizes)}, and those of "
                "Hugging Face have none"
            )
    source = there = there if merged is None else Merged(there, merged, at_least=dtype)
    check_complete(there)
    if vocab_size is not None and vocab_size != source.args.vocab_size:
        source = Resized(source, vocab_size)
    if dtype is not None:
        source = Cast(source, dtype)
    beside = _companions(there, tokenizer, merged)
    if beside.entries > source.args.vocab_size:
        raise DataError(
            f"the tokenizer has {beside.entries:,} entries, and the model {source.args.vocab_size:,}\n"
            f"  fix:  --vocab-size {beside.entries} adds rows, or --tokenizer names another"
        )
    if to == "dcp" and not _STEP.fullmatch(out.name):
        out = step_folder(out, 0)
    refuse_existing(out)
    return Conversion(there, source, to, out, beside, max_bytes)


def _absolute(path: Path) -> Path:
    """Give a path a name and a folder above it, which "." has not; a URL has both."""
    return Path(os.path.abspath(path)) if isinstance(path, Path) else path


def _opened(what: str, path: Path, adapter: Path | None, hashes: bool) -> tuple[WeightSource, Adapter | None]:
    """Open what is read, and the adapter that is merged into it."""
    if what == MERGE:
        assert adapter is not None
        return with_adapter(open_weights(path, verify=hashes), adapter, verify=hashes)
    there, found = open_adapted(path, verify=hashes)
    given = what.partition("-to-")[0]
    if found is None:
        [really] = [name for name, kind in FORMATS.items() if isinstance(there, kind)]
    else:
        really = "dcp" if found.run else "PEFT"
    if really != given:
        ways = join_or(f"{really}-to-{other}" for other in FORMATS if other != really)
        use = f"merge BASE {path} OUT" if really == "PEFT" else ways
        raise DataError(f"{path} is not what {what} reads: use {use}")
    return there, found


def convert(conversion: Conversion, *, verify: bool = False, progress: Progress = no_progress) -> None:
    """Write it, in this process alone. ``verify`` reads everything back before it gets its name.

    Raises:
        DataError, CheckpointError: a damaged source, or what ``verify`` has found, of which nothing is left;
            or a disk that is full.
    """
    source, out, others = conversion.source, conversion.out, conversion.others
    check, ranks = partial(compare, source) if verify else None, Ranks(alone=True)
    if conversion.to == "dcp":
        write_dcp(source, out, _manifest(conversion), progress=progress, check=check)
    elif conversion.to == "hf":
        write_hf(
            source, out, tokens=conversion.beside.tokens, others=others, max_bytes=conversion.max_bytes,
            ranks=ranks, progress=progress, check=check,
        )  # fmt: skip
    else:
        write_meta(source, out, others=others, ranks=ranks, progress=progress, check=check)


def mapping(conversion: Conversion) -> Iterator[str]:
    """A line a tensor: what it is, and what and where it will be."""
    source = conversion.source
    tensors, rows = in_order(source), table(source.args)
    shards = cut_into_files(tensors, conversion.max_bytes)
    files = {
        name: file for file, shard in zip(shard_names(len(shards)), shards, strict=True) for name in shard
    }
    for name, stored in tensors.items():
        before = conversion.there.tensors[name]
        then, where = name, PART
        if conversion.to == "hf":
            then = rows.to_hf(name)
            where = files[name]
        elif conversion.to == "dcp":
            then, where = MODEL_PREFIX + name, conversion.out.name
        moved = rows[name].rotary and (
            conversion.to == "hf" or isinstance(origin(conversion.there), SafetensorsFolder)
        )
        yield (
            f"{name} {before.shape} {_plain(before.dtype)} -> {then} {stored.shape} {_plain(stored.dtype)} "
            f"in {where}{', rows reordered' if moved else ''}"
        )


def compare(source: WeightSource, written: WeightSource) -> None:
    """Read both, a tensor at a time on each of a few threads.

    Raises:
        DataError: tensors that differ in any bit, that are missing, or that hold NaN or infinity, and fields
            of the shape that differ, by name.
    """
    meant, found = asdict(source.args), asdict(written.args)
    problems = {
        "its shape, where another was written": [
            f"{key} {found[key]} in place of {value}" for key, value in meant.items() if found[key] != value
        ],
        "not written": [name for name in source.tensors if name not in written.tensors],
        "of another shape or dtype than was to be": [
            name
            for name, stored in source.tensors.items()
            if name in written.tensors and written.tensors[name] != stored
        ],
    }
    differing: set[str] = set()
    not_finite: set[str] = set()

    def one(name: str) -> None:
        ours, theirs = source.read(name), written.read(name)
        bits = _BITS[ours.dtype.itemsize]
        if not torch.equal(ours.view(bits), theirs.view(bits)):
            differing.add(name)
        if not torch.isfinite(ours).all():
            not_finite.add(name)

    wrong = {name for names in problems.values() for name in names}
    with ThreadPoolExecutor(min(threads(), _AT_ONCE)) as pool:
        list(pool.map(one, [name for name in source.tensors if name not in wrong]))
    order = list(source.tensors)
    problems["not as they were read"] = sorted(differing, key=order.index)
    problems["with NaN or infinity"] = sorted(not_finite, key=order.index)
    lines = [f"{what}: {first_few(names, _SHOWN)}" for what, names in problems.items() if names]
    if lines:
        raise DataError("\n  ".join([f"{source.place}, converted, was not kept:", *lines]))


def _manifest(conversion: Conversion) -> dict[str, Any]:
    """A checkpoint's account of the model: the entries of a run that its readers look for."""
    tokenizer = conversion.beside.place
    return {
        "model_only": True,
        "model": json.loads(json.dumps(asdict(conversion.source.args))),  # lists, as when it is read
        "tokens": 0,
        "mesh": "",
        "special_tokens": asdict(conversion.beside.tokens),
        "tokenizer": tokenizer and str(tokenizer.resolve()),
        "versions": {
            "toolkit": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _companions(there: WeightSource, tokenizer: Path | None, adapter: Adapter | None) -> Companions:
    """The files of the tokenizer and its special tokens: those that the weights say, where it is theirs. An
    adapter's tokenizer goes before its base's."""
    others = tokenizer or (tokenizer_of(adapter) if adapter else None)
    tokenizer = others or tokenizer_of(there)
    add_bos = asked_bos(run_of(adapter or there))
    found = tokenizer_companions(tokenizer, add_bos=add_bos) if tokenizer else Companions()
    said = {} if others else special_tokens_of(there)
    if any(value is not None for value in said.values()):
        return replace(found, tokens=SpecialTokens(**said))
    return found


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
