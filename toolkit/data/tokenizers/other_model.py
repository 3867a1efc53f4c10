"""The refusal of a tiktoken file of a model that is not known. Imports no torch."""

from __future__ import annotations

from toolkit.errors import DataError
from toolkit.models.registry import tiktoken_forms


def other_model(what: str) -> DataError:
    """The error for a tiktoken file of another model, from ``what`` shows it."""
    forms = list(tiktoken_forms())
    known = [f"{form.n_ranks:,} ranks are {form.called}'s" for form in forms]
    known += [
        f"fewer are those of tools/train_tokenizer, for {form.called}'s word pattern"
        for form in forms
        if form.trained
    ]
    return DataError(
        f"{what}, and is of no known tokenizer: {', '.join(known)}\n"
        "  fix:  name the tokenizer.json of the same tokenizer, which says its pattern and special tokens"
    )
