"""Load a tokenizer of any kind, or read its vocabulary size without loading it.

The tokenizer libraries are imported only when needed, so that the preflight can read a vocabulary size in
tens of milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from toolkit.data.tokenizers.files import find
from toolkit.data.tokenizers.json_files import json_vocabulary_size
from toolkit.data.tokenizers.tiktoken_ranks import form_of
from toolkit.data.tokenizers.tokenizer import Tokenizer


def load_tokenizer(path: str | Path, *, add_bos: bool | None = None) -> Tokenizer:
    """Load the tokenizer in a folder (``model.hf_assets_path``) or file.

    ``add_bos`` overrides whether plain texts start with BOS.

    Raises:
            DataError: There is no tokenizer, a file is damaged or of unknown kind, or a requested BOS is
                missing.
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
    """Return the vocabulary size of the tokenizer at ``path`` (largest id + 1), without loading it.

    Raises:
            DataError: As in :func:`find`; or the file is not a tokenizer, or is a tiktoken file of an unknown
                model.
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
