"""The model of a family as it begins: on the meta device, where it is sharded before it has storage."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import ConfigError, Problem, first_few
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.parameters import table
from toolkit.models.registry import spec

_SHOWN = 3


def meta_decoder(args: ModelArgs, **options: Any) -> Decoder:
    """Make the model of ``args`` on the meta device; ``options`` are those of
    :class:`~toolkit.models.common.decoder.Decoder`.

    Raises:
        ConfigError: the family's decoder has other parameters or buffers than the rows of its table.
    """
    kind = spec(args.family).decoder() or Decoder
    with torch.device("meta"):
        model = kind(args, **options)
    there = [
        (named, tuple(tensor.shape), buffer)
        for buffer, tensors in ((False, model.named_parameters()), (True, model.named_buffers()))
        for named, tensor in tensors
    ]
    rows = [(name, row.shape, row.buffer) for name, row in table(args).items()]
    if changed := sorted({name for name, *_ in set(there) ^ set(rows)}):
        whose = f"the decoder of the family {args.family}, {kind.__module__}.{kind.__qualname__},"
        rule = f"{whose} and the rows of the family differ in {first_few(changed, _SHOWN)}"
        fix = "give each parameter and each buffer a row with its name and shape, and each row its tensor"
        raise ConfigError(Problem(rule, fix))
    return model
