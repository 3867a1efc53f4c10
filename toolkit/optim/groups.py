"""Learning rate, weight decay and optimizer of each parameter, by its name. Imports no torch.

The settings are ``optimizer.groups``, of which the first with a matching pattern applies; a decay of the
learning rate with the distance from the head (``layer_lr_decay``; ELECTRA, arXiv:2003.10555, appendix A); and
LoRA+ (``loraplus_lr_ratio``; arXiv:2402.12354). The schedule multiplies all rates by the same factor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from toolkit.config.name_patterns import matches_any
from toolkit.config.optimizer import Optimizer


class ParameterOptions(NamedTuple):
    """Options of one parameter.

    Attributes:
        label: the group's name, "*" without one; with LoRA+, those of B matrices end in ".lora_b".
        lr_ratio: learning rate, relative to ``optimizer.lr``.
        adamw: whether AdamW updates it instead of ``optimizer.name``.
    """

    label: str
    lr_ratio: float
    weight_decay: float
    adamw: bool


def group_of(name: str, options: Optimizer) -> str | None:
    """Return the name of the first group that matches a parameter."""
    return next((key for key, group in options.groups.items() if matches_any(name, group.params)), None)


def by_adamw(name: str, options: Optimizer) -> bool:
    """Return whether the group of a parameter asks for AdamW instead of ``optimizer.name``."""
    key = group_of(name, options)
    return key is not None and options.groups[key].name is not None


def parameter_options(name: str, options: Optimizer, n_layers: int | None) -> ParameterOptions:
    """Return the options of the parameter ``name`` in a model with ``n_layers`` blocks.

    Raises:
        ValueError: ``layer_lr_decay`` is set, but ``n_layers`` is None.
    """
    key, ratio, decay = group_of(name, options), 1.0, options.weight_decay
    label = "*" if key is None else key
    if key is not None:
        group = options.groups[key]
        ratio = ratio if group.lr is None else group.lr / options.lr
        decay = decay if group.weight_decay is None else group.weight_decay
    if options.loraplus_lr_ratio != 1 and name.endswith("lora_b"):
        label, ratio = f"{label}.lora_b", ratio * options.loraplus_lr_ratio
    if options.layer_lr_decay != 1:
        ratio *= options.layer_lr_decay ** _distance(name, n_layers)
    if matches_any(name, options.no_decay):
        decay = 0.0
    return ParameterOptions(label, ratio, decay, by_adamw(name, options))


def _distance(name: str, n_layers: int | None) -> int:
    """Return the number of layers from a parameter to the head, which includes the last norm."""
    if n_layers is None:
        raise ValueError("optimizer.layer_lr_decay needs the number of blocks: set model.n_layers")
    root, *rest = name.split(".")
    if root == "layers":
        return n_layers - int(rest[0])
    return n_layers + 1 if root == "tok_embeddings" else 0


class GroupSummary(NamedTuple):
    """The parameters with one label, and the smallest and largest of their options."""

    label: str
    elements: int
    lr_ratios: tuple[float, float]
    weight_decays: tuple[float, float]
    adamw: bool

    @property
    def metric(self) -> str:
        """Name of the largest learning rate in the metrics; "lr" if it is the schedule's."""
        name = self.label.lstrip("*.")
        return f"lr/{name}" if name else "lr"

    def describe(self, lr: float) -> str:
        rates, decays = (
            f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"
            for least, most in ((lr * self.lr_ratios[0], lr * self.lr_ratios[1]), self.weight_decays)
        )
        by = ", by AdamW" if self.adamw else ""
        return (
            f"optimizer group {self.label}: {self.elements:,} elements, lr {rates}, weight decay {decays}{by}"
        )


def summaries(sizes: Mapping[str, int], options: Optimizer, n_layers: int | None) -> Iterator[GroupSummary]:
    """Yield a summary per label for trained parameters of these ``sizes``, by name."""
    members: dict[str, list[tuple[int, ParameterOptions]]] = defaultdict(list)
    for name, size in sizes.items():
        of_name = parameter_options(name, options, n_layers)
        members[of_name.label].append((size, of_name))
    for label, of_label in members.items():
        ratios = [it.lr_ratio for _, it in of_label]
        decays = [it.weight_decay for _, it in of_label]
        ranges = (min(ratios), max(ratios)), (min(decays), max(decays))
        yield GroupSummary(label, sum(size for size, _ in of_label), *ranges, of_label[0][1].adamw)
