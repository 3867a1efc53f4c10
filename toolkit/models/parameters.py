"""Queries of a model's parameter table (``common/parameter_table.py``). Imports no torch."""

from __future__ import annotations

from functools import lru_cache

from toolkit.models.common.args import ModelArgs
from toolkit.models.common.parameter_table import Init, ParameterRow, ParameterTable, head_rows
from toolkit.models.registry import spec


@lru_cache(maxsize=64)
def table(args: ModelArgs) -> ParameterTable:
    """Return the parameter table of a model, built by its family."""
    return ParameterTable(args, spec(args.family).rows(args))


def parameter_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters and buffers by name, in the model's order; tied weights appear once."""
    return table(args).shapes


def linear_layers(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return the weight shapes (N, K) of the blocks' linear layers, by module name."""
    return table(args).linear


def adaptable(args: ModelArgs) -> dict[str, ParameterRow]:
    """Return the rows of the weights that LoRA may update, by the names of its targets."""
    return table(args).adaptable


def block_matrices(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that NF4 may store, by name: those of linear layers (N, K), and of
    stacked experts (E, N, K)."""
    rows = table(args).values()
    return {row.name: row.shape for row in rows if row.is_block_matrix}


def parameter_count(args: ModelArgs) -> int:
    """Return the number of parameters; tied weights count once."""
    return table(args).parameters


def head_parameters(args: ModelArgs) -> int:
    """Return the number of parameters of the head, even if it is tied."""
    return sum(row.size for row in head_rows(args))


def is_classifier_head(name: str, args: ModelArgs) -> bool:
    """Return whether the parameter ``name`` belongs to a classification head, which an LM does not have."""
    row = table(args).get(name)
    return args.classifier is not None and row is not None and row.part == "head"


def init_rule(name: str, args: ModelArgs) -> Init:
    """Return the initialization of the parameter ``name``."""
    return table(args)[name].init
