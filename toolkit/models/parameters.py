"""Parameters of a model, as the table of its family lists them. Imports no torch."""

from __future__ import annotations

from functools import lru_cache

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.table import Init, Table, head_rows
from toolkit.models.registry import spec


@lru_cache(maxsize=64)
def table(args: ModelArgs) -> Table:
    """The rows of a model of ``args``, from its family."""
    return Table(args, spec(args.family).rows(args))


def parameter_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Shapes of the distinct parameters, and of buffers, by name, in the model's order."""
    return table(args).shapes


def linear_layers(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Shapes (N, K) of the weights of the blocks' linear layers, by the layers' names."""
    return table(args).linear


def parameter_count(args: ModelArgs) -> int:
    """Number of distinct parameters; a tied head counts once."""
    return table(args).parameters


def head_parameters(args: ModelArgs) -> int:
    """Parameters of the head, a tied one's included."""
    return sum(row.size for row in head_rows(args))


def is_classifier_head(name: str, args: ModelArgs) -> bool:
    """Say if the parameter ``name`` is one of a classifier's head, which no language model has."""
    row = table(args).get(name)
    return args.classifier is not None and row is not None and row.part == "head"


def init_rule(name: str, args: ModelArgs) -> Init:
    """How the parameter ``name`` starts."""
    return table(args)[name].init
