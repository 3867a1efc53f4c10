"""Which tokenizer a folder holds: finding the file, telling its kind by content, naming its tokens.

A folder is searched for, in this order,

1. ``tokenizer.model``            tiktoken ranks or a SentencePiece model
2. ``original/tokenizer.model``   the same, where Hugging Face repositories of Meta keep it
3. ``tokenizer.json``             Hugging Face tokenizers

The ``.model`` files come first because they are what Meta's own code reads and because tiktoken encodes
four times faster than the JSON of the same vocabulary, to the same ids. Tokens that someone added beside
them are not lost: ``tokenizer_config.json`` of the same folder is read for their names and ids, or the file
in which other releases of transformers have them.
A tokenizer.json beside a SentencePiece model is taken where it puts a space before the first word of a
prompt alone: the model would put one after each special token of a dialog; and where it has added tokens that
are not special, as ``<think>``, which any text may hold and of which the model knows nothing.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.config.local_paths import expand_user, read_bytes
from toolkit.config.types import MAX_SIZE
from toolkit.data.tokenizers.json_files import first_added
from toolkit.errors import DataError
from toolkit.io.json_fields import MAX_BYTES, Fields, parse_object, read_if_there

if TYPE_CHECKING:
    from toolkit.storage.remote_path import RemotePath

Kind = Literal["tiktoken", "sentencepiece", "json"]

CANDIDATES = ("tokenizer.model", "original/tokenizer.model", "tokenizer.json")
ACCEPTED = (
    "accepted are tokenizer.model (tiktoken ranks or a SentencePiece model), "
    "original/tokenizer.model and tokenizer.json (Hugging Face tokenizers)"
)
TEMPLATE = "chat_template.jinja"
TOOL_USE = "additional_chat_templates/tool_use.jinja"
"""The chat template of a folder, and that for dialogs with tools."""
FILES = (
    *CANDIDATES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    TOOL_USE,
    "config.json",  # which, as Meta's params.json, tells releases apart that name their tokens differently
    "params.json",
)
"""Files of a folder that are read with its tokenizer."""
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")


@dataclass(frozen=True)
class TokenizerFiles:
    """One tokenizer on disk.

    Attributes:
        path: the file that defines it.
        folder: where the model files that belong to it are.
        kind: how to read that file.
        content: its bytes.
        added: name → id of the tokens that files beside a ``.model`` list.
        named: role ("bos", "eos", "pad") → token name, where that says so; "" is that there is none.
        add_bos: whether plain texts shall begin with BOS; None: as the folder's files say.
    """

    path: Path
    folder: Path
    kind: Kind
    content: bytes
    added: dict[str, int] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None


def find(path: str | Path) -> TokenizerFiles:
    """Find and read the tokenizer file at ``path``, a folder, here or in object storage, or the file itself.

    Raises:
        DataError: nothing there, or a file that is no tokenizer of a known kind.
    """
    given = expand_user(path)
    if not isinstance(given, os.PathLike):
        given = _fetched(given)
    if not os.path.exists(given):
        raise DataError(
            f"tokenizer path {str(path)!r} does not exist (from folder {Path.cwd()}); "
            f"it must be a local folder or file, not a model on a hub; {ACCEPTED}"
        )
    file, folder = given, given.parent
    if given.is_dir():
        folder = given
        found = [given / name for name in CANDIDATES if (given / name).is_file()]
        if not found:
            there = ", ".join(sorted(entry.name for entry in given.iterdir())[:12]) or "nothing"
            raise DataError(f"no tokenizer in folder {str(path)!r}: it holds {there}; {ACCEPTED}")
        file = found[0]
    elif folder.name == "original":
        folder = folder.parent
    try:
        content = read_bytes(file, at_most=MAX_BYTES)
    except OSError as error:
        raise DataError(f"cannot read tokenizer file {file}: {error.strerror}") from error
    kind = kind_of(content, file)
    if kind == "sentencepiece" and given.is_dir() and _says_more(folder / "tokenizer.json"):
        file, kind = folder / "tokenizer.json", "json"
        content = read_bytes(file, at_most=MAX_BYTES)
    added, named = _added_and_named(folder, kind)
    return TokenizerFiles(file, folder, kind, content, added, named)


@cache
def _fetched(place: RemotePath) -> Path:
    """A folder of this machine with those of FILES that are in ``place``, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in FILES:
        if (place / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((place / name).read_bytes())
    return folder


def kind_of(content: bytes, path: Path) -> Kind:
    """The kind of a tokenizer file, from its first bytes and never from its name."""
    head = content[:4096]
    if head.startswith(b"version https://git-lfs"):
        raise DataError(f"{path} is a Git LFS pointer, not the tokenizer itself: run `git lfs pull` there")
    if head.lstrip().startswith(b"{"):
        return "json"
    # A SentencePiece model is a protobuf message whose first field (1, bytes) is its first piece.
    if head.startswith(b"\x0a"):
        return "sentencepiece"
    if _TIKTOKEN_LINE.match(head if b"\n" in head else head + b"\n"):
        return "tiktoken"
    shown = "it is empty" if not content else f"it starts with {bytes(content[:16])!r}"
    raise DataError(f"{path} is no tokenizer of a known kind: {shown}; {ACCEPTED}")


def _says_more(path: Path) -> bool:
    """Say if a tokenizer.json, where there is one, puts a space before the first word of a prompt alone, or
    has added tokens that are not special."""
    described = read_if_there(path)
    pre, added = described.get("pre_tokenizer"), described.get("added_tokens")
    parts = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    return _any(parts, "prepend_scheme", "first") or _any(added, "special", False)


def _any(found: Any, key: str, value: Any) -> bool:
    """Say if ``found`` is a list with an object of which ``key`` is ``value``."""
    return isinstance(found, list) and any(isinstance(it, dict) and it.get(key) == value for it in found)


def adds_bos(files: TokenizerFiles, bos_id: int | None) -> bool:
    """Say if a plain text begins with the token ``bos_id``, as transformers reads the folder: by
    tokenizer.json where there is one, else by ``add_bos_token`` of tokenizer_config.json. Where neither says
    it, a text does, as with Meta's files.

    Raises:
        DataError: BOS is asked for and there is none, or a file cannot be read.
    """
    if files.add_bos is not None:
        if files.add_bos and bos_id is None:
            raise DataError(
                f"the tokenizer {files.path} has no BOS token for texts to begin with\n"
                "  fix:  leave add_bos_token out, or name BOS in tokenizer_config.json"
            )
        return files.add_bos
    if bos_id is None:
        return False
    described = (
        parse_object(files.content, files.path)
        if files.kind == "json"
        else read_if_there(files.folder / "tokenizer.json")
    )
    if described:
        return first_added(described.get("post_processor"), files.folder) == bos_id
    return read_if_there(files.folder / "tokenizer_config.json").get("add_bos_token", True) is not False


def declared(folder: Path) -> dict[str, Any]:
    """Return what tokenizer_config.json says; special_tokens_map.json goes before it, as in transformers,
    where it lists no added tokens.

    Raises:
        DataError: one of them is no JSON object.
    """
    config = read_if_there(folder / "tokenizer_config.json")
    lists = config.get("added_tokens_decoder") is not None
    return config if lists else config | read_if_there(folder / "special_tokens_map.json")


def _listed_elsewhere(folder: Path) -> dict[str, Any]:
    """Added tokens by id, where tokenizer_config.json lists none: releases of transformers before 4.34 have
    them in added_tokens.json, and those from 5 on in tokenizer.json."""
    found = {str(token): name for name, token in read_if_there(folder / "added_tokens.json").items()}
    described = read_if_there(folder / "tokenizer.json").get("added_tokens")
    tokens = described if isinstance(described, list) else []
    return found | {str(token.get("id")): token for token in tokens if isinstance(token, dict)}


def _added_and_named(folder: Path, kind: Kind) -> tuple[dict[str, int], dict[str, str]]:
    """(added token name → id, role → token name) that the files beside a tokenizer of ``kind`` declare."""
    values = declared(folder)
    if kind != "json" and values.get("added_tokens_decoder") is None:
        values |= {"added_tokens_decoder": _listed_elsewhere(folder)}
    config = Fields(values)

    def name(fields: Fields, key: str) -> str:
        token = fields.values.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        if not isinstance(content, str) and token is not None:
            fields.reject(key, "must be the name of a token")
        return content if isinstance(content, str) else ""

    listed = config.inner("added_tokens_decoder") or Fields({})
    for index in listed.values:
        if not (index.isascii() and index.isdigit() and int(index[:20]) <= MAX_SIZE):
            listed.reject(index, "must be a token under its id")
    names = {index: name(listed, index) for index in listed.values}
    roles = {role: name(config, f"{role}_token") for role in ("bos", "eos", "pad")}
    config.finish(f"{folder / 'tokenizer_config.json'}, or a file beside it, is not of a tokenizer")
    added = {token: int(index) for index, token in names.items()}
    return added, {role: token for role, token in roles.items() if token or f"{role}_token" in values}
