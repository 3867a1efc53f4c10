"""Rules for weighted mixtures of corpora."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from toolkit.config.schema import (
    SINGLE_CORPUS_KEYS,
    Field,
    fields_by_key,
    is_set,
    mixture_depth,
    overridden_keys,
)
from toolkit.config.values import format_toml
from toolkit.data.build import corpora
from toolkit.data.sources import EMBEDDED
from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, note, rule


def _key(name: str, option: str) -> str:
    return f"data.mixture.{name}.{option}"


@rule()
def mixture_or_dataset(run: PlannedRun) -> Iterator[Problem]:
    """Check that a mixture and a single dataset do not conflict; a mixture replaces the dataset of the base
    file."""
    for field in _single_corpus_fields(run):
        if field.key not in overridden_keys(run.config):
            leave = f"remove it, or set {field.name} = {format_toml(field.default)}, the default"
            add = f"to train on it as well, add [data.mixture.NAME] with {field.name} and a weight"
            rule = "is replaced by the corpora of [data.mixture]"
            yield run.problem(field.key, rule, f"{leave}; {add}")


@note
def mixture_notes(run: PlannedRun) -> list[str]:
    """Note settings of the base file that a mixture replaces."""
    config = run.config
    return [
        f"{key} = {format_toml(config.value(key))} ({config.origin(key)}) is overridden by [data.mixture]"
        for key in SINGLE_CORPUS_KEYS
        if key in overridden_keys(config)
    ]


def _single_corpus_fields(run: PlannedRun) -> list[Field]:
    """Return the keys of a single corpus that differ from their defaults, or that were set at a smaller depth
    than the mixture."""
    config = run.config
    if not config.data.mixture:
        return []
    mixture = mixture_depth(config)
    keys = [key for key in SINGLE_CORPUS_KEYS if is_set(config, key) or config.depth(key) < mixture]
    return [fields_by_key()[key] for key in keys]


@rule()
def mixture_weights_fit(run: PlannedRun) -> list[Problem]:
    """Check that no weight is too small for the blocks from which a mixture is drawn."""
    config = run.config
    weights = {name: part.weight for name, part in config.data.mixture.items()}
    if config.phases or config.phase is not None:  # a corpus may be for another phase
        weights = config.data.weights
    if not config.data.mixture:
        return []
    if not any(weights.values()):
        key = _key(min(config.data.mixture), "weight")
        return [run.problem(key, "no corpus has a weight above 0", "set a positive weight")]
    from toolkit.data.mixture import BLOCK, shares  # needs NumPy, unlike other checks

    least = sum(weights.values()) / BLOCK
    largest = _key(max(weights, key=weights.__getitem__), "weight")
    return [
        run.problem(
            _key(name, "weight"),
            f"is less than 1 / {BLOCK:,} of all weights: no sample would be drawn from it",
            f"set {_key(name, 'weight')} to at least {least:.4g}, or remove this corpus",
            largest,
        )
        for name, share in shares(weights).items()
        if share < 1
    ]


@rule()
def mixture_parts_differ(run: PlannedRun) -> Iterator[Problem]:
    """Check that no two corpora have the same text, whose samples would be drawn twice per epoch."""
    names = defaultdict(list)
    for corpus in corpora(run.config):
        group, _, name = corpus.table.rpartition(".")
        if group == "data.mixture":
            embedded = corpus.dataset_path is None and EMBEDDED.get(corpus.dataset)
            names[embedded or tuple(corpus.arguments().values())].append(name)
    for first, *others in names.values():
        for name in others:
            source = "dataset" if run.config.data.mixture[name].dataset_path is None else "dataset_path"
            yield run.problem(
                _key(name, source),
                f"[data.mixture.{first}] has the same text",
                "remove one of the two and give the other the sum of their weights, or make "
                f"{first} and {name} differ in dataset, dataset_path, dataset_subset, dataset_split or "
                "text_column",
                _key(name, "weight"),
            )
