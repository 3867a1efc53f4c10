"""Companions of weights that are handed on: the files of the tokenizer, and the special tokens' ids."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import saved_settings
from toolkit.config.local_paths import expand_user
from toolkit.data.tokenizers.added import extend_tokenizer
from toolkit.data.tokenizers.files import CANDIDATES, TEMPLATE, TOOL_USE, adds_bos, find
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

_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    TOOL_USE,
)


def tokenizer_of(source: WeightSource) -> Path | None:
    """The tokenizer beside the weights, or in the folder above, where Meta keeps one for several sizes; for a
    checkpoint the one that it was made with, at a path that starts where we are if it is relative."""
    places = [source.place]
    if isinstance(origin(source), MetaFolder):
        places.append(source.place.parent)
    if run := run_of(source):
        trained = saved_settings(run)
        named = [
            run.get("tokenizer"),
            trained.get("model.tokenizer_path"),
            trained.get("model.hf_assets_path"),
        ]
        places = [expand_user(name) for name in named if name]
        found = next((place for place in places if _has_tokenizer(place)), None)
        tokens, template = trained.get("model.additional_special_tokens", ()), _template(trained)
        if found is None or not (tokens or template):
            return found
        return extend_tokenizer(found, trained["data.cache_folder"], tokens=tokens, template=template)
    return next((place for place in places if _has_tokenizer(place)), None)


def _template(trained: Mapping[str, Any]) -> str | None:
    """The chat template of a run with these settings, as long as it is where it was; None for a family's."""
    asked = trained.get("data.chat_template")
    if not asked:
        return None
    from toolkit.data.chat.formats import template_text  # needs jinja

    with contextlib.suppress(DataError):
        return template_text(asked)
    return None


def run_of(source: WeightSource) -> Mapping[str, Any]:
    """Facts of the run that a checkpoint's or an adapter's manifest tells; none for other weights."""
    return getattr(origin(source), "run", {})


def asked_bos(run: Mapping[str, Any]) -> bool | None:
    """``model.add_bos_token`` of a checkpoint's ``run``."""
    return saved_settings(run).get("model.add_bos_token")


def special_tokens_of(source: WeightSource) -> Mapping[str, Any]:
    """The ids of "bos", "eos" (one, or all that end a text) and "pad" that the weights tell themselves: by
    the manifest of a checkpoint that was converted, else by generation_config.json before config.json.

    Raises:
        DataError: such a file cannot be read.
    """
    there = origin(source)
    if not isinstance(there, SafetensorsFolder | MetaFolder):
        return run_of(there).get("special_tokens") or {}
    found: dict[str, Any] = {}
    for name in (CONFIG, GENERATION_CONFIG):
        values = read_object(there.place / name) if (there.place / name).is_file() else {}
        said = {key: values.get(f"{key}_token_id") for key in ("bos", "eos", "pad")}
        found |= {key: value for key, value in said.items() if value is not None}
    return found


def eos_ids(source: WeightSource) -> tuple[int, ...]:
    """Every id that ends a text by what the weights tell themselves; none where they do not.

    Raises:
        DataError: a file that tells it cannot be read, or tells something else.
    """
    told = special_tokens_of(source).get("eos")
    ids = told if isinstance(told, list) else [] if told is None else [told]
    if not all(isinstance(token, int) for token in ids):
        raise DataError(f"{source.place}: eos_token_id must be an id or a list of ids, not {told!r}")
    return tuple(ids)


def _has_tokenizer(place: Path) -> bool:
    return place.is_file() or any((place / name).is_file() for name in CANDIDATES)


@dataclass(frozen=True)
class Companions:
    """``files`` by name, of which transformers alone needs those ``made`` here; ``entries`` is how many ids
    the tokenizer at ``place`` has, 0 without one."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    tokens: SpecialTokens = SpecialTokens()
    entries: int = 0
    place: Path | None = None
    made: frozenset[str] = frozenset()


def tokenizer_companions(path: Path, *, add_bos: bool | None = None) -> Companions:
    """Collect the files of the tokenizer in a folder, or of the file itself, as they are, by name.

    A tiktoken file without a tokenizer.json gets one, which transformers needs. Where ``add_bos`` is not what
    the files say, they are made to say it. What ends a text is what the tokenizer names, and what the chat
    template among the files writes behind an answer.

    Raises:
        DataError: there is none, or it is damaged.
    """
    found, tokenizer = find(path), load_tokenizer(path, add_bos=add_bos)
    beside = {name: found.folder / name for name in _NAMES if (found.folder / name).is_file()}
    files = {name: file.read_bytes() for name, file in beside.items()} | {found.path.name: found.content}
    made = tokenizer_json(tokenizer, found.content) if tokenizer.kind == "tiktoken" else {}
    names = made.keys() - files.keys()
    files = made | files
    if tokenizer.adds_bos != adds_bos(found, tokenizer.bos_id):
        files |= _saying_bos(files, tokenizer)
        names -= {"tokenizer_config.json"}
    stops = _stop_ids(tokenizer, files)
    eos = list(stops) if len(stops) > 1 else tokenizer.eos_id
    tokens = SpecialTokens(tokenizer.bos_id, eos, tokenizer.pad_id)
    return Companions(files, tokens, tokenizer.n_words, path, frozenset(names))


def _stop_ids(tokenizer: Tokenizer, files: Mapping[str, bytes]) -> tuple[int, ...]:
    """The tokenizer's, and those of the chat template among its ``files``, if that can be used."""
    if TEMPLATE in files or b'"chat_template"' in files.get("tokenizer_config.json", b""):
        from toolkit.data.chat.template import template_beside  # needs jinja

        with contextlib.suppress(DataError):
            if form := template_beside(tokenizer):
                return form.stop_ids
    return tokenizer.stop_ids


def _saying_bos(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Rewrite those of ``files`` that say whether texts begin with BOS to what ``tokenizer`` does."""
    config = json.loads(files.get("tokenizer_config.json", b"{}")) | {"add_bos_token": tokenizer.adds_bos}
    saying = {"tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False).encode()}
    if described := files.get("tokenizer.json"):
        changed = json.loads(described) | {"post_processor": post_processor(tokenizer)}
        saying["tokenizer.json"] = json.dumps(changed, ensure_ascii=False).encode()
    return saying
