"""Which tokenizer a folder holds: finding the file, telling its kind by content, naming its tokens.

A folder is searched for, in this order,

1. ``tokenizer.model``            tiktoken ranks (Llama 3 and 4) or a SentencePiece model (Llama 2)
2. ``original/tokenizer.model``   the same, where Hugging Face repositories of Meta keep it
3. ``tokenizer.json``             Hugging Face tokenizers

The ``.model`` files come first because they are what Meta's own code reads and because tiktoken encodes
four times faster than the JSON of the same vocabulary, to the same ids. Tokens that someone added beside
them are not lost: ``tokenizer_config.json`` of the same folder is read for their names and ids.

The tokenizer libraries are imported where one is needed, so that the preflight can ask for a
vocabulary's size in some tens of milliseconds.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import DataError

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

Kind = Literal["tiktoken", "sentencepiece", "json"]

CANDIDATES = ("tokenizer.model", "original/tokenizer.model", "tokenizer.json")
ACCEPTED = (
    "accepted are tokenizer.model (tiktoken ranks as of Llama 3 and 4, or SentencePiece as of Llama 2), "
    "original/tokenizer.model and tokenizer.json (Hugging Face tokenizers)"
)
N_LLAMA3_RANKS = 128_000
N_LLAMA3_SPECIAL = 256
PAD_LLAMA3 = "<|finetune_right_pad_id|>"
N_LLAMA4_RANKS = 200_000
N_LLAMA4_SPECIAL = 2048
PAD_LLAMA4 = "<|finetune_right_pad|>"
N_CL100K_RANKS = 100_256  # GPT-4's: its ranks would pass for Llama 3's, and its special tokens are others

# How text is cut into words before bytes are merged; a tiktoken file does not say it.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LLAMA4_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")


@dataclass(frozen=True)
class TokenizerFiles:
    """One tokenizer on disk.

    Attributes:
        path: the file that defines it.
        folder: where the model files that belong to it are.
        kind: how to read that file.
        content: its bytes.
        added: name → id of the tokens that ``tokenizer_config.json`` beside it lists.
        named: role ("bos", "eos", "pad") → token name, where that file says so.
        older_names: the model files beside it have no scaled RoPE: Llama 3.0, if of Llama 3 at all, which
            had other names for some special tokens.
        add_bos: whether plain texts shall begin with BOS; None: as the folder's files say.
    """

    path: Path
    folder: Path
    kind: Kind
    content: bytes
    added: dict[str, int] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    older_names: bool = False
    add_bos: bool | None = None


def find(path: str | Path) -> TokenizerFiles:
    """Find and read the tokenizer file at ``path``, a folder or the file itself.

    Raises:
        DataError: nothing there, or a file that is no tokenizer of a known kind.
    """
    given = Path(os.path.expanduser(path))
    if not given.exists():
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
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read tokenizer file {file}: {error.strerror}") from error
    kind = kind_of(content, file)
    added, named = _tokenizer_config(folder / "tokenizer_config.json")
    return TokenizerFiles(file, folder, kind, content, added, named, _is_llama3_0(folder))


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


def read_ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """The merge ranks of a tiktoken file: token bytes → rank, which is also its id.

    Raises:
        DataError: a line that is not "base64 rank", a token or rank given twice, or a rank left out.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            if not line.strip():
                continue
            raise DataError(f"{path}:{number}: expected 'base64 rank', found {line[:40]!r}") from error
    lines = sum(1 for line in content.splitlines() if line.strip())
    if len(ranks) != lines or set(ranks.values()) != set(range(lines)):
        raise DataError(f"{path}: the {lines} ranks are not 0 to {lines - 1}, each once; is the file whole?")
    return ranks


def of_llama3(n_ranks: int) -> bool:
    """Say if a tiktoken file of ``n_ranks`` ranks has Llama 3's form: its own, and the smaller ones of
    tools/train_tokenizer."""
    return n_ranks <= N_LLAMA3_RANKS and n_ranks != N_CL100K_RANKS


def check_ranks(n_ranks: int, path: Path) -> None:
    """Tell by the number of ranks whether word pattern and special tokens of a tiktoken file are known.

    Raises:
        DataError: they are not.
    """
    if not of_llama3(n_ranks) and n_ranks != N_LLAMA4_RANKS:
        raise not_llamas(f"{path} has {n_ranks:,} tiktoken ranks")


def not_llamas(what: str) -> DataError:
    """The error for a tiktoken file of another model, from ``what`` shows it."""
    return DataError(
        f"{what}, and is of no known tokenizer: {N_LLAMA3_RANKS:,} ranks are Llama 3's, {N_LLAMA4_RANKS:,} "
        "Llama 4's, and fewer those of tools/train_tokenizer, for Llama 3's word pattern\n"
        "  fix:  name the tokenizer.json of the same tokenizer, which says its pattern and special tokens"
    )


def tiktoken_pattern(n_ranks: int) -> str:
    """The word pattern for a tiktoken file of ``n_ranks`` ranks."""
    return LLAMA4_PATTERN if n_ranks == N_LLAMA4_RANKS else LLAMA3_PATTERN


def tiktoken_special_tokens(files: TokenizerFiles, n_ranks: int) -> dict[str, int]:
    """Names and ids of the special tokens after ``n_ranks`` ranks: Llama 3's 256 or Llama 4's 2048, then what
    was added.

    Ids are the same in all Llama 3 releases; names are not. Those that ``tokenizer_config.json``
    lists win, then 3.0's where the folder's model is of that release, and else those of 3.1 to 3.3.
    """
    listed = {name: token for name, token in files.added.items() if token >= n_ranks}
    older = files.older_names and n_ranks == N_LLAMA3_RANKS
    of_model = llama4_names() if n_ranks == N_LLAMA4_RANKS else llama3_names(older=older)
    names = dict(enumerate(of_model, start=n_ranks))
    by_id = {token: name for token, name in names.items() if name not in listed}
    by_id.update({token: name for name, token in listed.items()})
    return {by_id[token]: token for token in sorted(by_id)}


def vocabulary_size(path: str | Path) -> int:
    """Entries of the tokenizer at ``path`` (largest id + 1), without building it: a peek for checks.

    Raises:
        DataError: as :func:`find`, or a JSON file that is no tokenizer, or a tiktoken file of another model.
    """
    files = find(path)
    if files.kind == "json":
        return json_vocabulary_size(files)
    added = max(files.added.values(), default=-1) + 1
    if files.kind == "tiktoken":
        lines = files.content.count(b"\n") + (not files.content.endswith(b"\n"))
        check_ranks(lines, files.path)
        return max(lines + (N_LLAMA4_SPECIAL if lines == N_LLAMA4_RANKS else N_LLAMA3_SPECIAL), added)
    return max(sentencepiece_processor(files).get_piece_size(), added)


def json_vocabulary_size(files: TokenizerFiles) -> int:
    """Largest id + 1 in the vocabulary and the added tokens of a ``tokenizer.json``."""
    try:
        content = json.loads(files.content)
        vocabulary = content["model"]["vocab"]
        added = [token["id"] for token in content.get("added_tokens", [])]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{files.path} is no tokenizer.json of Hugging Face tokenizers: {type(error).__name__} {error}"
        ) from error
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *added], default=-1) + 1


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
        json.loads(files.content) if files.kind == "json" else read_json(files.folder / "tokenizer.json")
    )
    if described:
        return _first_added(described.get("post_processor"), files.folder) == bos_id
    return read_json(files.folder / "tokenizer_config.json").get("add_bos_token", True) is not False


def _first_added(post_processor: Any, folder: Path) -> int | None:
    """The token that the ``post_processor`` of a tokenizer.json puts before a text, found by asking it about
    a text of one token."""
    import tokenizers

    unknown = {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""}
    try:
        asked = tokenizers.Tokenizer.from_str(
            json.dumps({"model": unknown, "post_processor": post_processor})
        )
    except Exception as error:  # the library raises Exception itself
        raise DataError(
            f"the post_processor of tokenizer.json in {folder} cannot be read: {error}"
        ) from error
    found = asked.encode("a")
    return found.ids[0] if found.special_tokens_mask[0] else None


def sentencepiece_processor(files: TokenizerFiles) -> SentencePieceProcessor:
    """The SentencePiece model of ``files``, loaded."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=files.content)
    except RuntimeError as error:
        raise DataError(
            f"{files.path} ({len(files.content):,} bytes) is no whole SentencePiece model: {error}"
        ) from error


def llama3_names(*, older: bool = False) -> list[str]:
    """The 256 special tokens of Llama 3 by offset: 3.0's (``older``) or 3.1's and later."""
    names: list[str | None] = [None] * N_LLAMA3_SPECIAL
    names[0], names[1] = "<|begin_of_text|>", "<|end_of_text|>"
    names[6], names[7], names[9] = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
    if not older:
        names[4], names[8], names[10] = PAD_LLAMA3, "<|eom_id|>", "<|python_tag|>"
    reserved = (f"<|reserved_special_token_{index}|>" for index in range(N_LLAMA3_SPECIAL))
    return [name or next(reserved) for name in names]


def llama4_names() -> list[str]:
    """The 2048 special tokens of Llama 4 by offset."""

    def reserved(part: str, first: int, last: int) -> list[str]:
        return [f"{part}reserved_special_token_{index}" for index in range(first, last + 1)]

    text, vision, reasoning = "text_post_train_", "vision_", "reasoning_"
    names = [
        *("begin_of_text", "end_of_text", "fim_prefix", "fim_middle", "fim_suffix"),
        *("header_start", "header_end", "eom", "eot", "step", *reserved(text, 0, 5)),
        *("python_start", "python_end", "finetune_right_pad", *reserved(text, 8, 68)),
        *("image_start", "image_end", *reserved(vision, 0, 1), "tile_x_separator", "tile_y_separator"),
        *(*reserved(vision, 2, 5), "image", *reserved(vision, 6, 6), "patch", *reserved(vision, 7, 1047)),
        *(*reserved(reasoning, 0, 7), "reasoning_thinking_start", "reasoning_thinking_end"),
    ]
    names += reserved("", 0, N_LLAMA4_SPECIAL - len(names) - 1)
    return [f"<|{name}|>" for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file or it holds something else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _tokenizer_config(path: Path) -> tuple[dict[str, int], dict[str, str]]:
    """(added token name → id, role → token name) that a ``tokenizer_config.json`` declares."""
    config = read_json(path)

    def name(token: Any) -> str | None:
        return token.get("content") if isinstance(token, dict) else token

    listed = config.get("added_tokens_decoder", {})
    added = {str(name(token)): int(index) for index, token in listed.items()}
    roles = {role: name(config.get(f"{role}_token")) for role in ("bos", "eos", "pad")}
    return added, {role: token for role, token in roles.items() if token}


def _is_llama3_0(folder: Path) -> bool:
    """Whether the model files of ``folder`` are of Llama 3.0: the later ones have scaled RoPE."""
    hugging_face, meta = read_json(folder / "config.json"), read_json(folder / "params.json")
    if hugging_face.get("model_type") == "llama":
        return not (hugging_face.get("rope_scaling") or hugging_face.get("rope_parameters", {}).get("factor"))
    return bool(meta) and not meta.get("use_scaled_rope", False)
