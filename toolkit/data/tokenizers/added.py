"""Copies of a tokenizer with added special tokens or another chat template; the original is unchanged.

    <cache folder>/tokenizers/<key>/    the tokenizer's files, with the new tokens after all others

The key is the SHA-256 of the files, tokens and template, so equal copies are shared.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.data.cache_folder import local_cache
from toolkit.data.tokenizers.files import COMPANIONS, RELEASES, TEMPLATE, TOOL_USE, declared, find
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import DataError

CONFIG, TOKENIZER_JSON = "tokenizer_config.json", "tokenizer.json"


def extend_tokenizer(
    path: str | Path, cache_folder: str | Path, *, tokens: Sequence[str] = (), template: str | None = None
) -> Path:
    """Return the folder of a copy of the tokenizer at ``path`` with ``tokens`` added.

    New ids follow the largest existing id. ``template``, if given, is the copy's chat template.

    Raises:
        DataError: There is no tokenizer, it already has one of the tokens, or the copy cannot be written.
    """
    found, tokenizer = find(path), load_tokenizer(path)
    if existing := [name for name in tokens if _has(tokenizer, name)]:
        raise DataError(
            f"the tokenizer {tokenizer.path} already has the token {existing[0]}\n"
            "  fix:  remove it from model.additional_special_tokens"
        )
    paths = [found.folder / name for name in (TOKENIZER_JSON, *COMPANIONS, *RELEASES)]
    files = {str(path.relative_to(found.folder)): path.read_bytes() for path in paths if path.is_file()}
    files[found.path.name] = found.content
    if template is not None:
        files[TEMPLATE] = template.encode()
        files.pop(TOOL_USE, None)  # the given template applies to all dialogs
    key = hashlib.sha256(json.dumps([*tokens]).encode())
    for name in sorted(files):
        key.update(f"\0{name}\0{len(files[name])}\0".encode() + files[name])
    folder = local_cache(cache_folder) / "tokenizers" / key.hexdigest()[:32]
    if not folder.is_dir():
        ids = {name: number for number, name in enumerate(tokens, start=tokenizer.n_words)}
        if ids:
            files[CONFIG] = _configured(declared(found.folder), found.added, ids)
        if ids and TOKENIZER_JSON in files:
            files[TOKENIZER_JSON] = _described(files[TOKENIZER_JSON], ids)
        _write(folder, files)
    return folder


def _has(tokenizer: Tokenizer, name: str) -> bool:
    if name in tokenizer.special_tokens:
        return True
    ids = tokenizer.encode(name)
    return len(ids) == 1 and tokenizer.decode(ids) == name  # the library would keep the existing id


def _configured(config: dict[str, Any], added: dict[str, int], ids: dict[str, int]) -> bytes:
    """Return tokenizer_config.json, where ``.model`` files have their added tokens."""
    listed = {str(token): _entry(name) for name, token in (added | ids).items()}
    config["added_tokens_decoder"] = listed | (config.get("added_tokens_decoder") or {})
    config["additional_special_tokens"] = [*(config.get("additional_special_tokens") or []), *ids]
    return json.dumps(config, indent=2, ensure_ascii=False).encode()


def _described(content: bytes, ids: dict[str, int]) -> bytes:
    described = json.loads(content)
    entries = [{"id": token, **_entry(name)} for name, token in ids.items()]
    described["added_tokens"] = [*described.get("added_tokens", []), *entries]
    return json.dumps(described, ensure_ascii=False).encode()


def _entry(name: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": name, **flags, "special": True}


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files atomically, so that other processes may write the same files."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        copy = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            copy.chmod(0o755)
            for name, content in files.items():
                (copy / name).parent.mkdir(exist_ok=True)
                (copy / name).write_bytes(content)
            os.rename(copy, folder)
        except OSError:
            shutil.rmtree(copy, ignore_errors=True)
            if not folder.is_dir():
                raise
    except OSError as error:
        raise DataError(
            f"the copy of the tokenizer cannot be written to {folder}: {error}\n"
            "  fix:  set data.cache_folder to a writable folder"
        ) from error
