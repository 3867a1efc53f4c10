"""Rules about weighted mixtures of corpora."""

from __future__ import annotations

from collections import defaultdict

from toolkit.config.schema import find_field
from toolkit.config.values import format_toml
from toolkit.data.sources import EMBEDDED, check_source
from toolkit.errors import DataError, Problem
from toolkit.preflight.facts import Run, rule


def _key(name: str, option: str) -> str:
    return f"data.mixture.{name}.{option}"


@rule()
def mixture_or_dataset(run: Run) -> list[Problem]:
    """A mixture takes the place of the one corpus."""
    problems = []
    for option in ("dataset", "dataset_path", "dataset_subset", "dataset_split"):
        field = find_field(f"training.{option}")
        assert field is not None
        if run.config.data.mixture and run.config.value(field.key) != field.default:
            fix = f"remove it, or set {option} = {format_toml(field.default)}, the default; to train on it "
            fix += f"as well, make it a part: [data.mixture.NAME] with {option} and a weight"
            problems.append(run.problem(field.key, "the corpora of [data.mixture] take its place", fix))
    return problems


@rule()
def mixture_weights_fit(run: Run) -> list[Problem]:
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
def mixture_parts_differ(run: Run) -> list[Problem]:
    """Two parts with the same text go over it independently: each of its samples comes twice an epoch."""
    names = defaultdict(list)
    for name, part in run.config.data.mixture.items():
        text: tuple[str | None, ...] = (EMBEDDED.get(part.dataset),)
        if part.dataset_path is not None or part.dataset not in EMBEDDED:
            column = run.config.data.text_column if part.text_column is None else part.text_column
            text = (part.dataset_path or part.dataset, part.dataset_subset, part.dataset_split, column)
        names[text].append(name)
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


@rule(DataError)
def mixture_readable(run: Run) -> list[Problem]:
    """Each corpus of a mixture is there and has the column."""
    problems = []
    for name, part in run.config.data.mixture.items():
        column = run.config.data.text_column if part.text_column is None else part.text_column
        found = check_source(
            part.dataset, part.dataset_path, column, subset=part.dataset_subset, split=part.dataset_split
        )
        if found and found.key == "text_column" and part.text_column is None:
            fix = f"set {_key(name, 'text_column')}, or data.text_column, to the one that holds the text"
            problems.append(run.problem("data.text_column", found.rule, fix))
        elif found:
            problems.append(run.problem(_key(name, found.key), found.rule, found.fix))
    return problems


@rule(DataError)
def mixture_resumable(run: Run) -> list[Problem]:
    """The position in the data counts samples of certain parts and shares (the text is compared later)."""
    config = run.config
    if run.manifest is None or not run.resumes or "dataloader" in config.checkpoint.exclude_from_loading:
        return []
    saved, now = run.manifest["run"].get("loader", {}), _position_counts(run)
    counted = f"the data position of the checkpoint {run.loaded} was counted with"
    fix = 'go back to that, or start the data anew with checkpoint.exclude_from_loading = ["dataloader"]'
    before, here = saved.get("corpus", ""), now.get("corpus", "one corpus")
    if before != here and "mixture of " in before + here:
        key = next((_key(name, "weight") for name in config.data.mixture), "training.dataset")
        before = before if before.startswith("mixture of ") else "one corpus"
        return [run.problem(key, f"{counted} {before}, and this run has {here}", fix)] if saved else []
    return [
        run.problem(_key(name, "weight"), f"{counted} a share of {saved[share]}, now it is {now[share]}", fix)
        for name in config.data.mixture
        if saved.get(share := f"{name}.share", now.get(share)) != now.get(share)
    ]


def _position_counts(run: Run) -> dict[str, str]:
    """What of a mixture the position in the data depends on; nothing where a weight is too small."""
    if not run.config.data.mixture or mixture_weights_fit(run):
        return {}
    from toolkit.data.mixture import identity, quotas

    return identity(quotas({name: part.weight for name, part in run.config.data.mixture.items()}))
