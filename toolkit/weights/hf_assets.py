"""Tokenizer files and special token ids that accompany exported weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import saved_settings
from toolkit.config.local_paths import assets_folder
from toolkit.data.tokenizers.added import extend_tokenizer
from toolkit.data.tokenizers.files import CANDIDATES, COMPANIONS, TEMPLATE, adds_bos, find
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.to_json import post_processor, tokenizer_json
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError
from toolkit.io.json_fields import read_object
from toolkit.models.common.hf_config import GENERATION_CONFIG
from toolkit.models.common.spec import CONFIG
from toolkit.weights.hf_write import SpecialTokens
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource
from toolkit.weights.views import origin

_NAMES = ("tokenizer.json", "tokenizer.model", *COMPANIONS)


def tokenizer_of(source: WeightSource) -> Path | None:
    """Find the tokenizer next to the weights or in the parent folder, where Meta stores one for several
    sizes. For a checkpoint, find the one used in training (relative paths start at the working directory)."""
    paths = [source.place]
    if isinstance(origin(source), MetaFolder):
        paths.append(source.place.parent)
    if run := run_of(source):
        settings = saved_settings(run)
        configured = [
            run.get("tokenizer"),
            settings.get("model.tokenizer_path"),
            settings.get("model.hf_assets_path"),
        ]
        paths = [assets_folder(path) for path in configured if path]
        found = next((path for path in paths if _has_tokenizer(path)), None)
        tokens, template = settings.get("model.additional_special_tokens", ()), _template(settings)
        if found is None or not (tokens or template):
            return found
        return extend_tokenizer(found, settings["data.cache_folder"], tokens=tokens, template=template)
    return next((path for path in paths if _has_tokenizer(path)), None)


def _template(settings: Mapping[str, Any]) -> str | None:
    """Return the chat template of a run's settings if its file still exists; None for a family's format."""
    path = settings.get("data.chat_template")
    if not path:
        return None
    from toolkit.data.chat.choose_format import template_text  # needs jinja

    with contextlib.suppress(DataError):
        return template_text(path)
    return None


def run_of(source: WeightSource) -> Mapping[str, Any]:
    """Return a manifest's ``run``, of a checkpoint or adapter; {} for other weights."""
    return getattr(origin(source), "run", {})


def configured_add_bos(run: Mapping[str, Any]) -> bool | None:
    """Return ``model.add_bos_token`` of a checkpoint's ``run``."""
    return saved_settings(run).get("model.add_bos_token")


def special_tokens_of(source: WeightSource) -> Mapping[str, Any]:
    """Return the ids of "bos", "eos" (one or a list) and "pad" stored with the weights: in a checkpoint's
    manifest, else in generation_config.json, else in config.json.

    Raises:
        DataError: one of these files cannot be read.
    """
    base = origin(source)
    if not isinstance(base, SafetensorsFolder | MetaFolder):
        return run_of(base).get("special_tokens") or {}
    found: dict[str, Any] = {}
    for name in (CONFIG, GENERATION_CONFIG):
        values = read_object(base.place / name) if (base.place / name).is_file() else {}
        values = {**(values.get("text_config") or {}), **values}  # of a multimodal model
        ids = {key: values.get(f"{key}_token_id") for key in ("bos", "eos", "pad")}
        found |= {key: value for key, value in ids.items() if value is not None}
    return found


def eos_ids(source: WeightSource) -> tuple[int, ...]:
    """Return every EOS id stored with the weights; () if there are none.

    Raises:
        DataError: a file with the ids cannot be read, or a value has the wrong type.
    """
    eos = special_tokens_of(source).get("eos")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) for token in ids):
        raise DataError(f"{source.place}: eos_token_id must be an id or a list of ids, not {eos!r}")
    return tuple(ids)


def _has_tokenizer(path: Path) -> bool:
    return path.is_file() or any((path / name).is_file() for name in CANDIDATES)


@dataclass(frozen=True)
class Companions:
    """Files that accompany weights.

    Attributes:
        files: contents by name.
        entries: number of ids of the tokenizer at ``place``; 0 without a tokenizer.
        generated: names of the files generated here, which only transformers needs.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    tokens: SpecialTokens = SpecialTokens()
    entries: int = 0
    place: Path | None = None
    generated: frozenset[str] = frozenset()


def tokenizer_companions(path: Path, *, add_bos: bool | None = None) -> Companions:
    """Collect the files of a tokenizer folder or file.

    A tokenizer.json is added to a tiktoken file without one, because transformers needs it. If ``add_bos``
    differs from the files' setting, they are changed. EOS ids are those of the tokenizer and those that the
    chat template writes after an answer.

    Raises:
        DataError: there is no tokenizer, or it is damaged.
    """
    found, tokenizer = find(path), load_tokenizer(path, add_bos=add_bos)
    paths = {name: found.folder / name for name in _NAMES if (found.folder / name).is_file()}
    files = {name: file.read_bytes() for name, file in paths.items()} | {found.path.name: found.content}
    generated = tokenizer_json(tokenizer, found.content) if tokenizer.kind == "tiktoken" else {}
    names = generated.keys() - files.keys()
    files = generated | files
    if tokenizer.adds_bos != adds_bos(found, tokenizer.bos_id):
        files |= _with_add_bos(files, tokenizer)
        names -= {"tokenizer_config.json"}
    stops = _stop_ids(tokenizer, files)
    eos = list(stops) if len(stops) > 1 else tokenizer.eos_id
    tokens = SpecialTokens(tokenizer.bos_id, eos, tokenizer.pad_id)
    return Companions(files, tokens, tokenizer.n_words, path, frozenset(names))


def _stop_ids(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> tuple[int, ...]:
    """Return the stop ids of the chat template in ``files`` if it is usable, else those of the tokenizer."""
    if TEMPLATE in files or b'"chat_template"' in files.get("tokenizer_config.json", b""):
        from toolkit.data.chat.template import template_beside  # needs jinja

        with contextlib.suppress(DataError):
            if chat_format := template_beside(tokenizer):
                return chat_format.stop_ids
    return tokenizer.stop_ids


def _with_add_bos(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Change the ``files`` that determine whether texts begin with BOS to match ``tokenizer``, and return
    them."""
    config = json.loads(files.get("tokenizer_config.json", b"{}")) | {"add_bos_token": tokenizer.adds_bos}
    changed = {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}
    if content := files.get("tokenizer.json"):
        values = json.loads(content) | {"post_processor": post_processor(tokenizer)}
        changed["tokenizer.json"] = json.dumps(values, ensure_ascii=False).encode()
    return changed
