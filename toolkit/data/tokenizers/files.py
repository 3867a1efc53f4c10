"""Find a folder's tokenizer file, detect its kind from its content, and read the names of its tokens.

A folder is searched for, in this order,

1. ``tokenizer.model``            tiktoken ranks or a SentencePiece model
2. ``original/tokenizer.model``   the same, in Hugging Face repositories of Meta
3. ``tokenizer.json``             Hugging Face tokenizers

The ``.model`` files come first because Meta's own code reads them, and because tiktoken encodes four times
faster than the JSON tokenizer of the same vocabulary, with the same ids. Tokens that were added later are
included: their names and ids are read from ``tokenizer_config.json`` in the same folder, or from the files in
which other releases of transformers store them. A tokenizer.json next to a SentencePiece model is preferred
in two cases. The first is that it puts a space only before the first word of a prompt, whereas the model puts
one after each special token of a dialog. The second is that it has added tokens that are not special, such as
``<think>``, which the model does not have.
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
    "supported are tokenizer.model (tiktoken ranks or a SentencePiece model), "
    "original/tokenizer.model and tokenizer.json (Hugging Face tokenizers)"
)
TEMPLATE = "chat_template.jinja"
TOOL_USE = "additional_chat_templates/tool_use.jinja"
"""Files of a folder's chat template and of its template for dialogs with tools."""
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TEMPLATE, TOOL_USE)
"""Files of a folder that are read together with its tokenizer."""
RELEASES = ("config.json", "params.json")
"""Files that distinguish releases with different token names."""
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")


@dataclass(frozen=True)
class TokenizerFiles:
    """One tokenizer on disk.

    Attributes:
        path: File that defines the tokenizer.
        folder: Folder of the model's files.
        kind: Kind of the file at ``path``.
        content: Bytes of that file.
        added: Name → id of the tokens listed by files next to a ``.model`` file.
        named: Role ("bos", "eos", "pad") → token name, where defined; "" if there is none.
        add_bos: Whether plain text starts with BOS; None leaves it to the folder's files.
    """

    path: Path
    folder: Path
    kind: Kind
    content: bytes
    added: dict[str, int] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool | None = None


def find(path: str | Path) -> TokenizerFiles:
    """Find and read the tokenizer file at ``path``, a file or a folder, local or in object storage.

    Raises:
            DataError: There is no file, or it is not a tokenizer of a known kind.
    """
    given = expand_user(path)
    if not isinstance(given, os.PathLike):
        given = _download(given)
    if not os.path.exists(given):
        raise DataError(
            f"tokenizer path {str(path)!r} does not exist (from folder {Path.cwd()}); "
            f"it must be a local folder or file, not a model on the Hub; {ACCEPTED}"
        )
    file, folder = given, given.parent
    if given.is_dir():
        folder = given
        candidates = [given / name for name in CANDIDATES if (given / name).is_file()]
        if not candidates:
            names = ", ".join(sorted(entry.name for entry in given.iterdir())[:12]) or "nothing"
            raise DataError(f"no tokenizer in folder {str(path)!r}: it contains {names}; {ACCEPTED}")
        file = candidates[0]
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
def _download(remote: RemotePath) -> Path:
    """Copy the files of a tokenizer in ``remote`` to a local folder that exists until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="tokenizer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in (*CANDIDATES, *COMPANIONS, *RELEASES):
        if (remote / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((remote / name).read_bytes())
    return folder


def kind_of(content: bytes, path: Path) -> Kind:
    """Detect the kind of a tokenizer file from its first bytes, regardless of its name."""
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
    raise DataError(f"{path} is not a tokenizer of a known kind: {shown}; {ACCEPTED}")


def _says_more(path: Path) -> bool:
    """Return whether a tokenizer.json exists that puts a space only before the first word of a prompt, or has
    added tokens that are not special."""
    described = read_if_there(path)
    pre, added = described.get("pre_tokenizer"), described.get("added_tokens")
    parts = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    return _any(parts, "prepend_scheme", "first") or _any(added, "special", False)


def _any(items: Any, key: str, value: Any) -> bool:
    """Return whether ``items`` is a list with an object whose ``key`` is ``value``."""
    return isinstance(items, list) and any(isinstance(it, dict) and it.get(key) == value for it in items)


def adds_bos(files: TokenizerFiles, bos_id: int | None) -> bool:
    """Return whether plain text starts with the token ``bos_id``, as in transformers.

    tokenizer.json decides if it exists, otherwise ``add_bos_token`` in tokenizer_config.json. The default is
    True, as for Meta's files.

    Raises:
        DataError: BOS is requested but does not exist, or a file cannot be read.
    """
    if files.add_bos is not None:
        if files.add_bos and bos_id is None:
            raise DataError(
                f"the tokenizer {files.path} has no BOS token\n"
                "  fix:  remove add_bos_token, or define BOS in tokenizer_config.json"
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
    """Return tokenizer_config.json, overridden by special_tokens_map.json if it lists no added tokens.

    transformers has the same precedence.

    Raises:
            DataError: One of the files is not a JSON object.
    """
    config = read_if_there(folder / "tokenizer_config.json")
    lists = config.get("added_tokens_decoder") is not None
    return config if lists else config | read_if_there(folder / "special_tokens_map.json")


def _listed_elsewhere(folder: Path) -> dict[str, Any]:
    """Return added tokens, by id, that tokenizer_config.json does not list.

    transformers before 4.34 stores them in added_tokens.json; from 5 on, in tokenizer.json.
    """
    tokens_by_id = {str(token): name for name, token in read_if_there(folder / "added_tokens.json").items()}
    described = read_if_there(folder / "tokenizer.json").get("added_tokens")
    tokens = described if isinstance(described, list) else []
    return tokens_by_id | {str(token.get("id")): token for token in tokens if isinstance(token, dict)}


def _added_and_named(folder: Path, kind: Kind) -> tuple[dict[str, int], dict[str, str]]:
    """Return (added token name → id, role → token name) from files next to a ``kind`` tokenizer."""
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
    config.finish(f"{folder / 'tokenizer_config.json'}, or a file next to it, is not of a tokenizer")
    added = {token: int(index) for index, token in names.items()}
    return added, {role: token for role, token in roles.items() if token or f"{role}_token" in values}
