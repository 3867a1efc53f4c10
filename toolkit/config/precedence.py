"""Values that others have taken the place of: a preset's steps, where a file that extends it has epochs, or
the epochs of a file over which steps are given."""

from __future__ import annotations

import math

from toolkit.config.schema import Config, fields_by_key

PAIRS = {
    "training.steps": "training.epochs",
    "lr_scheduler.warmup_steps": "lr_scheduler.warmup_ratio",
}
"""Keys, and the other keys for the same thing."""

ONE_CORPUS = tuple(
    f"training.{name}"
    for name in ("dataset", "dataset_path", "dataset_subset", "dataset_split", "format", "columns")
)
"""The keys that [data.mixture] takes the place of."""


def is_set(config: Config, key: str) -> bool:
    """Say if a value is not the default: the config that a run saves names every key."""
    return bool(config.value(key) != fields_by_key()[key].default)


def replaced(config: Config) -> frozenset[str]:
    """The keys that give way to others which were set nearer to the user; as near, they contradict."""
    pairs = {
        key
        for key, other in PAIRS.items()
        if is_set(config, key) and is_set(config, other) and config.depth(other) < config.depth(key)
    }
    corpus = {key for key in ONE_CORPUS if is_set(config, key) and mixture_depth(config) < config.depth(key)}
    return frozenset(pairs | corpus)


def without_replaced(config: Config) -> Config:
    """``config`` without epochs, or the ratio of a warm-up, over which steps are given. Where it is the other
    way round, nothing reads the steps, which stay to be told."""
    for key, other in PAIRS.items():
        if is_set(config, other) and config.depth(key) < config.depth(other):
            table, _, name = other.partition(".")
            cleared = getattr(config, table).model_copy(update={name: None})
            config = config.model_copy(update={table: cleared})
    return config


def mixture_depth(config: Config) -> float:
    """How far from the user the nearest key of [data.mixture] was set; infinity without one."""
    keys = [field.key for field in config.present_fields() if field.key.startswith("data.mixture.")]
    return min(map(config.depth, keys), default=math.inf)
