"""A tokenizer of whatever kind a folder holds, and its size alone.

The tokenizer libraries are imported where one is needed, so that the preflight can ask for a
vocabulary's size in some tens of milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from toolkit.data.tokenizers.files import find
from toolkit.data.tokenizers.json_files import json_vocabulary_size
from toolkit.data.tokenizers.tiktoken_ranks import form_of
from toolkit.data.tokenizers.tokenizer import Tokenizer


def load_tokenizer(path: str | Path, *, add_bos: bool | None = None) -> Tokenizer:
    """The tokenizer in a folder (``model.hf_assets_path``), or in the file itself; ``add_bos`` has plain
    texts begin with BOS, or not, whatever the folder says.

    Raises:
        DataError: none there, or a file that is damaged or of no known kind, or without the BOS asked for.
    """
    files = replace(find(path), add_bos=add_bos)
    if files.kind == "tiktoken":
        from toolkit.data.tokenizers.tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer(files)
    if files.kind == "sentencepiece":
        from toolkit.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(files)
    from toolkit.data.tokenizers.json_tokenizer import JsonTokenizer

    return JsonTokenizer(files)


def vocabulary_size(path: str | Path) -> int:
    """Entries of the tokenizer at ``path`` (largest id + 1), without building it: a peek for checks.

    Raises:
        DataError: as :func:`find`, or a JSON file that is no tokenizer, or a tiktoken file of another model.
    """
    files = find(path)
    if files.kind == "json":
        return json_vocabulary_size(files.content, files.path)
    added = max(files.added.values(), default=-1) + 1
    if files.kind == "tiktoken":
        lines = files.content.count(b"\n") + (not files.content.endswith(b"\n"))
        return max(lines + form_of(lines, files.path).n_special, added)
    from toolkit.data.tokenizers.sentencepiece_tokenizer import sentencepiece_processor

    return max(sentencepiece_processor(files).get_piece_size(), added)
