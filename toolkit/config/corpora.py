"""The corpora that a run reads, wherever the configuration names them."""

from __future__ import annotations

from typing import Any, NamedTuple

from toolkit.config.schema import Config


class CorpusOptions(NamedTuple):
    """What one table says of a corpus. ``column_key`` is the key that its text column comes from."""

    table: str
    dataset: str
    dataset_path: str | None
    dataset_subset: str | None
    dataset_split: str
    text_column: str
    column_key: str

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``data.sources.open_source`` and ``check_source``."""
        return {
            "name": self.dataset,
            "path": self.dataset_path,
            "text_column": self.text_column,
            "subset": self.dataset_subset,
            "split": self.dataset_split,
        }


def corpora(config: Config) -> list[CorpusOptions]:
    """The corpora of the training, those of the mixture where there is one, and that of the validation."""
    tables = [f"data.mixture.{name}" for name in sorted(config.data.mixture)] or ["training"]
    return [_options(config, table) for table in [*tables, *["validation"] * config.validation.enable]]


def _options(config: Config, table: str) -> CorpusOptions:
    options = config.value(table)
    own_column = getattr(options, "text_column", None) is not None
    column_key = f"{table}.text_column" if own_column else "data.text_column"
    return CorpusOptions(
        table,
        options.dataset,
        options.dataset_path,
        options.dataset_subset,
        options.dataset_split,
        config.value(column_key),
        column_key,
    )
