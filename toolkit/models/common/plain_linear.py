"""Check the class of a layer before another class replaces it."""

from __future__ import annotations

from torch import nn

from toolkit.errors import ConfigError, Problem


def check_plain(
    name: str, layer: nn.Module, *, key: str, value: object, without: str, kind: type[nn.Module] = nn.Linear
) -> None:
    """Check that the class of ``layer`` (``name``) is ``kind`` before ``key`` = ``value`` replaces it.

    ``without`` is a fix that avoids the replacement.

    Raises:
        ConfigError: it has another class, whose forward would be lost.
    """
    if type(layer) is not kind:
        plain = "torch.nn.Linear" if kind is nn.Linear else kind.__name__
        rule = f"{name} is a {type(layer).__name__}, and only a plain {plain} can be replaced"
        fix = f"{without}, or move what it adds into its parent module, next to a plain {plain}"
        raise ConfigError(Problem(rule, fix, key, value))
