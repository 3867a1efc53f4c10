"""Values that others have taken the place of: a preset's steps, where a file that extends it has epochs."""

from __future__ import annotations

from toolkit.config.schema import Config, fields_by_key

_PAIRS = {
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
        for key, other in _PAIRS.items()
        if is_set(config, key) and is_set(config, other) and _nearness(config, other) > _nearness(config, key)
    }
    corpus = {key for key in ONE_CORPUS if config.data.mixture and is_set(config, key)}
    return frozenset(pairs | {key for key in corpus if _mixture_is_nearer(config, key)})


def _nearness(config: Config, key: str) -> int:
    """How near to the user a key was set: a flag is nearer than the config file, and that than its bases."""
    origin = config.origin(key)
    if origin.startswith("--"):
        return 2
    return 1 if origin.rpartition(":")[0] == config.job.config_file else 0


def _mixture_is_nearer(config: Config, key: str) -> bool:
    """Say if a file sets ``key`` and another file or a flag the mixture, nearer as far as can be told."""

    def place(key: str) -> str:
        origin = config.origin(key)
        return "flags" if origin.startswith("--") else origin.rpartition(":")[0]

    set_by = {place(field.key) for field in config.present_fields() if field.key.startswith("data.mixture.")}
    if place(key) == config.job.config_file:
        return "flags" in set_by and place(key) not in set_by
    return place(key) not in {"flags", *set_by}
