"""Rules about weighted mixtures of corpora."""

from __future__ import annotations

from collections import defaultdict

from toolkit.config.schema import ONE_CORPUS, Field, fields_by_key, is_set, mixture_depth, replaced
from toolkit.config.values import format_toml
from toolkit.data.build import corpora
from toolkit.data.sources import EMBEDDED
from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, note, rule


def _key(name: str, option: str) -> str:
    return f"data.mixture.{name}.{option}"


@rule()
def mixture_or_dataset(run: PlannedRun) -> list[Problem]:
    """A mixture and a dataset side by side contradict one another; a mixture replaces the one of a base."""
    problems = []
    for field in _besides(run):
        if field.key not in replaced(run.config):
            leave = f"remove it, or set {field.name} = {format_toml(field.default)}, the default"
            add = (
                f"to train on it as well, make it a part: [data.mixture.NAME] with {field.name} and a weight"
            )
            said = "the corpora of [data.mixture] take its place"
            problems.append(run.problem(field.key, said, f"{leave}; {add}"))
    return problems


@note
def mixture_notes(run: PlannedRun) -> list[str]:
    """Tell which settings of the file that the config extends a mixture replaces."""
    config = run.config
    return [
        f"{key} = {format_toml(config.value(key))} ({config.origin(key)}) gives way to [data.mixture]"
        for key in ONE_CORPUS
        if key in replaced(config)
    ]


def _besides(run: PlannedRun) -> list[Field]:
    """The keys of the one corpus that are not at their defaults, or set over the mixture that there is."""
    config = run.config
    if not config.data.mixture:
        return []
    mixture = mixture_depth(config)
    keys = [key for key in ONE_CORPUS if is_set(config, key) or config.depth(key) < mixture]
    return [fields_by_key()[key] for key in keys]


@rule()
def mixture_weights_fit(run: PlannedRun) -> list[Problem]:
    """A weight that is too small for the blocks in which a mixture is drawn would be rounded away."""
    mixture = run.config.data.mixture
    if not mixture:
        return []
    from toolkit.data.mixture import BLOCK, shares  # needs NumPy, which other checks do without

    weights = {name: part.weight for name, part in mixture.items()}
    least = sum(weights.values()) / BLOCK
    return [
        run.problem(
            _key(name, "weight"),
            f"is less than 1 / {BLOCK:,} of all weights: no sample would come from it",
            f"set it to at least {least:.4g}, or remove the part",
        )
        for name, share in shares(weights).items()
        if share < 1
    ]


@rule()
def mixture_parts_differ(run: PlannedRun) -> list[Problem]:
    """Two parts with the same text go over it independently: each of its samples comes twice an epoch."""
    names = defaultdict(list)
    for corpus in corpora(run.config):
        group, _, name = corpus.table.rpartition(".")
        if group == "data.mixture":
            embedded = corpus.dataset_path is None and EMBEDDED.get(corpus.dataset)
            names[embedded or tuple(corpus.arguments().values())].append(name)
    return [
        run.problem(
            _key(name, "dataset" if run.config.data.mixture[name].dataset_path is None else "dataset_path"),
            f"[data.mixture.{first}] draws from the same text",
            f"remove one of the two and give the other the sum of their weights; {first} and {name} must "
            "differ in dataset, dataset_path, dataset_subset, dataset_split or text_column",
        )
        for first, *others in names.values()
        for name in others
    ]
