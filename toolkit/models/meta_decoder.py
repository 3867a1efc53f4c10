"""The model of a family as it begins: on the meta device, where it is sharded before it has storage."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import ConfigError, Problem, first_few
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.parameters import parameter_shapes
from toolkit.models.registry import spec

_SHOWN = 3


def meta_decoder(args: ModelArgs, **options: Any) -> Decoder:
    """Make the model of ``args`` on the meta device; ``options`` are those of
    :class:`~toolkit.models.common.decoder.Decoder`.

    Raises:
        ConfigError: the family's own decoder has buffers, which nothing would fill once there is storage, or
            other parameters than Decoder.
    """
    kind = spec(args.family).decoder() or Decoder
    with torch.device("meta"):
        model = kind(args, **options)
    whose = f"the decoder of the family {args.family}, {kind.__module__}.{kind.__qualname__},"
    if buffers := [name for name, _ in model.named_buffers()]:
        rule = f"{whose} has buffers, which nothing fills once it has storage: {first_few(buffers, _SHOWN)}"
        raise ConfigError(Problem(rule, "compute them in forward, or keep a number as an attribute"))
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if changed := sorted({name for name, _ in found.items() ^ parameter_shapes(args).items()}):
        rule = f"{whose} adds, removes or reshapes {first_few(changed, _SHOWN)}: checkpoints and conversions "
        rule += "hold the parameters of Decoder"
        raise ConfigError(Problem(rule, "keep their names and shapes"))
    return model
