"""Build a run's tokenizer and tokenized corpora from the configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from toolkit.config import Config
from toolkit.config.local_paths import assets_folder
from toolkit.data.content_hash import say
from toolkit.data.corpus import PREFERENCE
from toolkit.data.run_data import BASE_CORPUS, RunData
from toolkit.data.sources import open_corpus
from toolkit.data.token_cache import tokenize_corpus
from toolkit.data.token_files import TokenCache
from toolkit.data.tokenizers.load_tokenizer import load_tokenizer
from toolkit.data.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from toolkit.data.chat.sft import ChatOptions
    from toolkit.data.chat.shapes import Shape
    from toolkit.data.labeled_texts import LabeledTexts


_PAIR_DATA: Mapping[str, Literal["labels", "margins"]] = {"kto": "labels", "reward": "margins"}
"""Data of pairs that objectives use in addition to the answers."""


def open_data(config: Config, *, progress: bool) -> RunData:
    """Load the tokenizer and open the token caches, building missing ones.

    The launcher calls this before it starts the ranks, so that a progress bar has the terminal to itself, and
    passes the result to the ranks. Without a launcher, each rank calls it before joining the process group,
    so that slow tokenization does not exceed the timeout of a collective.

    Raises:
        DataError: A corpus or the tokenizer is missing, empty or unreadable, or an untokenized corpus is
            larger than data.max_inline_gb.
    """
    tokenizer = run_tokenizer(config)
    limit = config.data.max_inline_gb
    caches = dict(open_corpora(config, tokenizer, progress=progress, max_inline_gb=limit))
    return RunData(tokenizer.n_words, tokenizer.pad_id, caches)


def run_tokenizer(config: Config) -> Tokenizer:
    """Load the model's tokenizer."""
    return load_tokenizer(tokenizer_path(config), add_bos=config.model.add_bos_token)


def tokenizer_path(config: Config) -> Path:
    """Return the path of the tokenizer: the model's, or a copy with added special tokens or chat template.

    Raises:
        DataError: The copy cannot be created.
    """
    options = config.model
    place = assets_folder(options.tokenizer_path or options.hf_assets_path)
    tokens, asked = options.additional_special_tokens, config.data.chat_template
    if not tokens and not asked:
        return place
    from toolkit.data.chat.choose_format import template_text  # needs jinja
    from toolkit.data.tokenizers.added import extend_tokenizer

    template = template_text(asked) if asked else None
    if not tokens and template is None:
        return place
    return extend_tokenizer(place, config.data.cache_folder, tokens=tokens, template=template)


def open_corpora(config: Config, tokenizer: Tokenizer, **options: Any) -> Iterator[tuple[str, TokenCache]]:
    """Yield each corpus of the run with the name of its table in the config; ``options`` are those of
    :func:`open_tokens`.

    Raises:
        DataError: As in :func:`open_data`.
    """
    for corpus in corpora(config):
        if corpus.table != "training" or not config.data.streaming:
            yield corpus.table, open_tokens(config, corpus, tokenizer, **options)


def open_tokens(config: Config, corpus: CorpusOptions, tokenizer: Tokenizer, **options: Any) -> TokenCache:
    """Open one corpus as tokens; ``options`` are passed to :func:`toolkit.data.token_cache.tokenize_corpus`.

    Raises:
        DataError: As in :func:`open_data`.
    """
    cache = tokenize_corpus(
        open_corpus(**corpus.arguments()),
        tokenizer,
        cache_folder=config.data.cache_folder,
        chat=_chat_options(config) if corpus.shape else None,
        **options,
    )
    if corpus.shape:
        from toolkit.data.chat.empty_masks import check_conversations

        seq_len = config.value("validation" if corpus.table == "validation" else "training").seq_len
        check_conversations(cache, seq_len, config.data.empty_mask, corpus.table)
        for remark, n in cache.remarks.items():
            share = f"{n:,} of {cache.n_documents:,} conversations"
            say(options.get("progress", True), f"note   [{corpus.table}] in {share} {remark}")
    return cache


def _chat_options(config: Config) -> ChatOptions:
    from toolkit.data.chat.sft import ChatOptions  # needs jinja

    data = config.data
    return ChatOptions(data.chat_template, data.chat_template_kwargs, data.train_on, data.mask_empty_thinking)


class CorpusOptions(NamedTuple):
    """Options of one corpus. ``column_key``, ``format_key`` and ``columns_key`` are the config keys of its
    text column, format and column names."""

    table: str
    dataset: str
    dataset_path: str | None
    dataset_subset: str | None
    dataset_split: str
    text_column: str
    column_key: str
    format: str
    format_key: str
    columns: Mapping[str, str]
    columns_key: str
    labeled: LabeledTexts | None
    objective: str

    @property
    def shape(self) -> Shape | None:
        """Row format of its conversations; None for plain text."""
        if self.format == "text":
            return None
        from toolkit.data.chat.shapes import Shape

        paired = self.format == PREFERENCE
        data: Literal["", "labels", "margins"] = _PAIR_DATA.get(self.objective, "") if paired else ""
        return Shape(self.format, tuple(self.columns.items()), data)

    def arguments(self) -> dict[str, Any]:
        """Arguments for ``data.sources.open_corpus``."""
        return {
            "name": self.dataset,
            "path": self.dataset_path,
            "text_column": self.text_column,
            "subset": self.dataset_subset,
            "split": self.dataset_split,
            "shape": self.shape or self.labeled,
        }


def corpora(config: Config) -> list[CorpusOptions]:
    """Return the corpora of training, or of its mixture, and of validation."""
    tables = [f"data.mixture.{name}" for name in sorted(config.data.mixture)] or ["training"]
    if config.validation.enable:
        tables += ["validation", *[BASE_CORPUS] * config.validation.base_corpus.named]
    return [_options(config, table) for table in tables]


def _options(config: Config, table: str) -> CorpusOptions:
    options = config.value(table)
    column_key, format_key, columns_key = (
        f"{table if getattr(options, name, None) is not None else 'data'}.{name}"
        for name in ("text_column", "format", "columns")
    )
    return CorpusOptions(
        table,
        options.dataset or "",
        options.dataset_path,
        options.dataset_subset,
        options.dataset_split,
        config.value(column_key),
        column_key,
        config.value(format_key),
        format_key,
        config.value(columns_key),
        columns_key,
        _labeled(config, column_key) if table != BASE_CORPUS else None,
        config.finetune.objective,
    )


def _labeled(config: Config, column_key: str) -> LabeledTexts | None:
    """Return the row shape of a classifier's corpora; None for a language model."""
    options = config.finetune.classification
    if not options.num_labels:
        return None
    from toolkit.data.labeled_texts import LabeledTexts

    return LabeledTexts(config.value(column_key), options.label_column, options.names)
