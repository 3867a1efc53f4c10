"""Check linear layers before another class replaces them."""

from __future__ import annotations

from torch import nn

from toolkit.errors import ConfigError, Problem


def check_plain(name: str, layer: nn.Module, *, key: str, value: object, without: str) -> None:
    """Check that ``layer`` (``name``) is a plain torch.nn.Linear before ``key`` = ``value`` replaces it.

    ``without`` is a fix that avoids the replacement.

    Raises:
        ConfigError: it has another class, whose forward would be lost.
    """
    if type(layer) is not nn.Linear:
        rule = f"{name} is a {type(layer).__name__}, and only a plain torch.nn.Linear can be replaced"
        fix = f"{without}, or move what it adds into its parent module, next to a plain torch.nn.Linear"
        raise ConfigError(Problem(rule, fix, key, value))
