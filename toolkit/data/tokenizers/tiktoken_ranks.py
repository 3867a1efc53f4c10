"""Tiktoken files: their merge ranks, and the model family to which they belong.

The file contains neither the pre-tokenization regex nor the special tokens; both are derived from the number
of ranks (:class:`~toolkit.models.common.tiktoken_form.TiktokenForm`). Imports no torch.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path

from toolkit.errors import DataError
from toolkit.models.common.tiktoken_form import TiktokenForm
from toolkit.models.registry import tiktoken_forms


def read_ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Parse the merge ranks of a tiktoken file: token bytes → rank, which is also the token's id.

    Raises:
        DataError: A line is not "base64 rank", a token or rank occurs twice, or a rank is missing.
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
        raise DataError(
            f"{path}: the {lines} ranks are not 0 to {lines - 1}, each once; is the file complete?"
        )
    return ranks


def form_of(n_ranks: int, path: Path) -> TiktokenForm:
    """Return the format of a tiktoken file with ``n_ranks`` ranks.

    Raises:
        DataError: Its pre-tokenization regex and special tokens are unknown.
    """
    for form in tiktoken_forms():
        if form.matches(n_ranks):
            return form
    raise other_model(f"{path} has {n_ranks:,} tiktoken ranks")


def other_model(what: str) -> DataError:
    """Return the error for a tiktoken file of an unknown model; ``what`` describes it."""
    forms = list(tiktoken_forms())
    known = [f"{form.n_ranks:,} ranks for {form.display_name}" for form in forms]
    known += [
        f"fewer from llama-toolkit train-tokenizer, for {form.display_name}'s word pattern"
        for form in forms
        if form.trained
    ]
    return DataError(
        f"{what}, which matches no known tokenizer: {', '.join(known)}\n"
        "  fix:  use the tokenizer.json of the same tokenizer, which contains its pattern and special tokens"
    )


def special_tokens(
    form: TiktokenForm, n_ranks: int, folder: Path, added: Mapping[str, int]
) -> dict[str, int]:
    """Return names and ids of the special tokens after ``n_ranks`` ranks. They are ``added``, from the
    ``tokenizer_config.json`` in ``folder``, and the format's special tokens for all other ids."""
    listed = {name: token for name, token in added.items() if token >= n_ranks}
    of_form = form.special_tokens(folder if n_ranks == form.n_ranks else None)
    names = dict(enumerate(of_form, start=n_ranks))
    by_id = {token: name for token, name in names.items() if name not in listed}
    by_id.update({token: name for name, token in listed.items()})
    return {by_id[token]: token for token in sorted(by_id)}
