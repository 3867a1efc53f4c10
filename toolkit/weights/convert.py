"""Convert weights between formats, with verification. The names come from the parameter table."""

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
from toolkit.finetune.merge import Merged
from toolkit.finetune.open_adapter import open_adapted, with_adapter
from toolkit.finetune.saved_adapter import Adapter
from toolkit.io.work_folder import reject_existing
from toolkit.launcher.environment import threads
from toolkit.models.common.args import RopeScaling
from toolkit.models.parameters import table
from toolkit.models.registry import spec
from toolkit.weights.dcp_write import write_dcp
from toolkit.weights.folder_write import Progress, no_progress
from toolkit.weights.hf_assets import (
    Companions,
    configured_add_bos,
    run_of,
    special_tokens_of,
    tokenizer_companions,
    tokenizer_of,
)
from toolkit.weights.hf_write import MAX_BYTES, Published, SpecialTokens, generation_config, write_hf
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.meta_write import PART, write_meta
from toolkit.weights.open import MODEL_PREFIX, CheckpointWeights, open_weights
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource
from toolkit.weights.views import Cast, Resized, check_complete, in_order, origin

MERGE = "merge"
FORMATS: Mapping[str, type] = {"hf": SafetensorsFolder, "meta": MetaFolder, "dcp": CheckpointWeights}
_STEP = re.compile(r"step-(\d+)")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
TOKENIZER_MODEL = "tokenizer.model"
_SHOWN = 8
_COMPARE_THREADS = 4  # each has one tensor of both sources in memory


@dataclass(frozen=True)
class Conversion:
    """A prepared conversion of ``source`` to the format ``to`` at ``out``, with the tokenizer's
    ``companions``.

    ``original`` is the source before its dtype and vocabulary are changed.
    """

    original: WeightSource
    source: WeightSource
    to: str
    out: Path
    companions: Companions
    max_bytes: int = MAX_BYTES

    @property
    def others(self) -> Mapping[str, bytes]:
        """Files to write next to the weights. Meta's params.json has no BOS and EOS ids, so they are written
        to generation_config.json, as for Hugging Face."""
        files, generated = self.companions.files, self.companions.generated
        if self.to == "meta":
            original = {name: content for name, content in files.items() if name not in generated}
            return generation_config(self.companions.tokens) | original
        return files

    @property
    def missing(self) -> list[str]:
        """Files and ids that readers of the format expect but that were not found."""
        if self.to == "meta":
            return [] if TOKENIZER_MODEL in self.companions.files else [TOKENIZER_MODEL]
        if self.to == "dcp":
            return []
        ids = {"bos_token_id": self.companions.tokens.bos, "eos_token_id": self.companions.tokens.eos}
        tokenizer = [] if self.companions.files else ["tokenizer"]
        return tokenizer + [key for key, token in ids.items() if token is None]

    @property
    def bytes(self) -> int:
        return sum(stored.nbytes for stored in self.source.tensors.values())


def prepare(
    what: str,
    path: Path,
    out: Path,
    *,
    adapter: Path | Adapter | None = None,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    max_bytes: int = MAX_BYTES,
    hashes: bool = True,
    ema: bool = False,
) -> Conversion:
    """Prepare a conversion and check everything except the elements of the weights.

    ``what`` is "hf-to-dcp" or similar, or "merge", which merges an ``adapter`` into the model at ``path`` and
    writes the Hugging Face format. The checkpoint of an adapter is converted as its base with the adapter
    merged.

    The tokenizer is ``tokenizer``, else the one next to the weights, else the one used in training. For a
    checkpoint, ``out`` is a step-N folder, or the parent folder for step-0. ``hashes`` verifies a source
    checkpoint first. ``ema`` reads the moving average of its trained weights.

    Raises:
        DataError, CheckpointError: the weights are missing, damaged, of another format, or do not match their
            config; ``out`` exists; or the tokenizer does not fit.
    """
    path, out = _absolute(path), _absolute(out)
    try:
        original, merged = _open_source(what, path, adapter, hashes, ema)
    except PermissionError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    to = "hf" if what == MERGE else what.partition("-to-")[2]
    if to == "meta" and spec(original.args.family).meta_params() is None:
        family = spec(original.args.family).hf_config().display_name
        raise DataError(f"{path} is {family}, which Meta's format does not support")
    scaling = original.args.rope_scaling
    if to == "meta" and not isinstance(scaling, RopeScaling | None):
        raise DataError(f"{path} scales RoPE by {scaling}, which Meta's format does not support")
    if classifier := original.args.classifier:
        if to == "meta":
            raise DataError(f"{path} is a classifier, which Meta's format does not support")
        if to == "hf" and classifier.hidden_sizes:
            raise DataError(
                f"the classifier {path} has hidden layers, {list(classifier.hidden_sizes)}, which the "
                "Hugging Face format does not support"
            )
    source = original = original if merged is None else Merged(original, merged, at_least=dtype)
    check_complete(original)
    if vocab_size is not None and vocab_size != source.args.vocab_size:
        source = Resized(source, vocab_size)
    if dtype is not None:
        source = Cast(source, dtype)
    # An adapter in memory was made from the model itself.
    companions = _companions(original, tokenizer, None if isinstance(adapter, Adapter) else merged)
    if companions.entries > source.args.vocab_size:
        raise DataError(
            f"the tokenizer has {companions.entries:,} entries, the model {source.args.vocab_size:,}\n"
            f"  fix:  add rows with --vocab-size {companions.entries}, or set another --tokenizer"
        )
    if to == "dcp" and not _STEP.fullmatch(out.name):
        out = step_folder(out, 0)
    reject_existing(out)
    return Conversion(original, source, to, out, companions, max_bytes)


def _absolute(path: Path) -> Path:
    """Return an absolute path, so that it has a name and a parent, unlike "."; URLs always have both."""
    return Path(os.path.abspath(path)) if isinstance(path, Path) else path


def _open_source(
    what: str, path: Path, adapter: Path | Adapter | None, hashes: bool, ema: bool
) -> tuple[WeightSource, Adapter | None]:
    """Open the weights, and the adapter to merge."""
    if what == MERGE:
        assert adapter is not None
        if isinstance(adapter, Adapter):
            return open_weights(path, verify=hashes, ema=ema), adapter
        return with_adapter(open_weights(path, verify=hashes), adapter, verify=hashes, ema=ema)
    source, found = open_adapted(path, verify=hashes, ema=ema)
    if found is None:
        [actual] = [name for name, kind in FORMATS.items() if isinstance(source, kind)]
    else:
        actual = "dcp" if found.run else "PEFT"
    if actual != what.partition("-to-")[0]:
        options = join_or(f"{actual}-to-{other}" for other in FORMATS if other != actual)
        use = f"merge BASE {path} OUT" if actual == "PEFT" else options
        raise DataError(f"{path} is in another format than {what} reads: use {use}")
    return source, found


def convert(conversion: Conversion, *, verify: bool = False, progress: Progress = no_progress) -> None:
    """Write the converted weights in this process. ``verify`` reads the weights back before the final rename.

    Raises:
        DataError, CheckpointError: the disk is full; or the source is damaged or ``verify`` failed, in which
            case the output is removed.
    """
    source, out, others = conversion.source, conversion.out, conversion.others
    check, ranks = partial(compare, source) if verify else None, Ranks(alone=True)
    if conversion.to == "dcp":
        write_dcp(source, out, _manifest(conversion), progress=progress, check=check)
    elif conversion.to == "hf":
        write_hf(
            source, out, tokens=conversion.companions.tokens, others=others, max_bytes=conversion.max_bytes,
            ranks=ranks, progress=progress, check=check,
        )  # fmt: skip
    else:
        write_meta(source, out, others=others, ranks=ranks, progress=progress, check=check)


def mapping(conversion: Conversion) -> Iterator[str]:
    """Yield one line per tensor with its name, shape, dtype and file before and after conversion. Stacked
    experts, which are one Hugging Face tensor each, share a line."""
    source = conversion.source
    rows, published = table(source.args), Published(source)
    files = {name: file for file, names in published.files(conversion.max_bytes).items() for name in names}
    for name, stored in in_order(source).items():
        before = conversion.original.tensors[name]
        new_name, file = name, PART
        if conversion.to == "hf":
            row = rows[name]
            new_name = row.hf.replace("{}", f"{{0..{row.experts - 1}}}")
            file = ", ".join(dict.fromkeys(files[theirs] for theirs in row.hf_names))
            stored = published.tensors[row.hf_names[0]]
        elif conversion.to == "dcp":
            new_name, file = MODEL_PREFIX + name, conversion.out.name
        reordered = rows[name].rotary and (
            conversion.to == "hf" or isinstance(origin(conversion.original), SafetensorsFolder)
        )
        yield (
            f"{name} {before.shape} {_plain(before.dtype)} -> {new_name} {stored.shape} "
            f"{_plain(stored.dtype)} in {file}{', rows reordered' if reordered else ''}"
        )


def compare(source: WeightSource, written: WeightSource) -> None:
    """Read and compare all tensors in several threads.

    Raises:
        DataError: tensors differ in any bit, are missing, or contain a NaN or infinity, or model args differ;
            all are reported by name.
    """
    expected, found = asdict(source.args), asdict(written.args)
    problems = {
        "wrong model args": [
            f"{key} {found[key]} instead of {value}" for key, value in expected.items() if found[key] != value
        ],
        "not written": [name for name in source.tensors if name not in written.tensors],
        "of the wrong shape or dtype": [
            name
            for name, stored in source.tensors.items()
            if name in written.tensors and written.tensors[name] != stored
        ],
    }
    differing: set[str] = set()
    not_finite: set[str] = set()

    def compare_tensor(name: str) -> None:
        tensor, other = source.read(name), written.read(name)
        bits = _BITS[tensor.dtype.itemsize]
        if not torch.equal(tensor.view(bits), other.view(bits)):
            differing.add(name)
        if not torch.isfinite(tensor).all():
            not_finite.add(name)

    wrong = {name for names in problems.values() for name in names}
    with ThreadPoolExecutor(min(threads(), _COMPARE_THREADS)) as pool:
        list(pool.map(compare_tensor, [name for name in source.tensors if name not in wrong]))
    order = list(source.tensors)
    problems["different after writing"] = sorted(differing, key=order.index)
    problems["with NaN or infinity"] = sorted(not_finite, key=order.index)
    lines = [f"{what}: {first_few(names, _SHOWN)}" for what, names in problems.items() if names]
    if lines:
        raise DataError("\n  ".join([f"the conversion of {source.place} failed verification:", *lines]))


def _manifest(conversion: Conversion) -> dict[str, Any]:
    """Build the ``run`` entries that readers of a checkpoint need in its manifest."""
    tokenizer = conversion.companions.place
    return {
        "model_only": True,
        "model": json.loads(
            json.dumps(asdict(conversion.source.args))
        ),  # tuples become lists, as in a manifest
        "tokens": 0,
        "mesh": "",
        "special_tokens": asdict(conversion.companions.tokens),
        "tokenizer": tokenizer and str(tokenizer.resolve()),
        "versions": {"toolkit": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _companions(source: WeightSource, tokenizer: Path | None, adapter: Adapter | None) -> Companions:
    """Collect the tokenizer's files and special tokens. If the tokenizer belongs to the weights, special
    tokens stored with the weights take precedence. An adapter's tokenizer takes precedence over its
    base's."""
    other = tokenizer or (tokenizer_of(adapter) if adapter else None)
    tokenizer = other or tokenizer_of(source)
    add_bos = configured_add_bos(run_of(adapter or source))
    companions = tokenizer_companions(tokenizer, add_bos=add_bos) if tokenizer else Companions()
    ids = {} if other else special_tokens_of(source)
    if any(value is not None for value in ids.values()):
        return replace(companions, tokens=SpecialTokens(**ids))
    return companions


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
