"""Linear layers whose place another layer may take."""

from __future__ import annotations

from torch import nn

from toolkit.errors import ConfigError, Problem


def check_plain(name: str, layer: nn.Module, *, key: str, value: object, without: str) -> None:
    """See that the ``layer`` called ``name`` computes what torch.nn.Linear does, whose place another takes
    where ``key`` has this ``value``; ``without`` says how it would not.

    Raises:
        ConfigError: it is of another class, whose forward would be lost.
    """
    if type(layer) is not nn.Linear:
        rule = f"{name} is a {type(layer).__name__}, and only a plain torch.nn.Linear can be replaced"
        fix = f"{without}, or compute what it adds in the module that holds it, beside a plain one"
        raise ConfigError(Problem(rule, fix, key, value))
