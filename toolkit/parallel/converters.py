"""Model converters (``model.converters``), applied in order before a model is sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from toolkit.config import Config
from toolkit.config.custom_import import component_error
from toolkit.config.schema import registry
from toolkit.config.types import FLOAT8
from toolkit.errors import first_few
from toolkit.parallel.mesh import Mesh

_KEY = "model.converters"


class Converters:
    """The converters of ``config``. Each has ``convert(model)``. Optional methods are ``connect(models,
    mesh)``, called once all stages of this rank are sharded, and ``post_optimizer_hook(models)``, called
    after each update."""

    def __init__(self, config: Config):
        self._all: list[Any] = []
        self._config = config
        for name in config.model.converters:
            if name in FLOAT8:
                from toolkit.parallel.float8 import Float8Converter

                self._all.append(Float8Converter(config))
            else:
                self._all.append(converter := registry("model.converters")[name](config))
                if not callable(getattr(converter, "convert", None)):
                    raise component_error(
                        config, _KEY, name, None, f"{converter!r} has no method convert(model)"
                    )

    def convert(self, model: nn.Module) -> None:
        """Convert ``model``, or a stage of it, on the meta device, in place.

        Raises:
            ConfigError: a user's converter adds, removes, reshapes, casts or unfreezes a parameter or buffer.
        """
        for name, converter in zip(self._config.model.converters, self._all, strict=True):
            before, trained = _signatures(model), _trained(model)
            converter.convert(model)
            rule = ""
            if changed := sorted({name for name, _ in before.items() ^ _signatures(model).items()}):
                rule = f"adds, removes, reshapes or casts {first_few(changed, 3)}, which checkpoints contain"
            elif more := sorted(_trained(model) - trained):
                rule = f"unfreezes {first_few(more, 3)}: set requires_grad=False on the replacement"
            if rule:
                raise component_error(self._config, _KEY, name, type(converter).convert, rule)

    def connect(self, models: Sequence[nn.Module], mesh: Mesh) -> list[Callable[[], None]]:
        """Call the converters' ``connect`` with the sharded ``models``, and return their post-optimizer
        hooks."""
        for converter in self._all:
            if hasattr(converter, "connect"):
                converter.connect(models, mesh)
        hooks = [getattr(converter, "post_optimizer_hook", None) for converter in self._all]
        return [partial(hook, models) for hook in hooks if hook]


def _signatures(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (it.shape, it.dtype) for name, it in (*model.named_parameters(), *model.named_buffers())}


def _trained(model: nn.Module) -> set[str]:
    return {name for name, it in model.named_parameters() if it.requires_grad}
