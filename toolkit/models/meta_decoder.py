"""Build a model on the meta device, to be sharded before it is allocated."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.errors import ConfigError, Problem, first_few
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.parameters import table
from toolkit.models.registry import spec


def meta_decoder(args: ModelArgs, *, dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    """Build the model of ``args`` on the meta device, with parameters of ``dtype``; ``options`` are passed to
    :class:`~toolkit.models.common.decoder.Decoder`.

    Buffers have at least fp32: they accumulate small steps, such as those of experts' biases, which bf16
    would round away.

    Raises:
        ConfigError: parameters or buffers of the family's decoder do not match its parameter table.
    """
    decoder = spec(args.family).decoder() or Decoder
    with torch.device("meta"):
        model = decoder(args, **options)
    tensors = {
        (name, tuple(tensor.shape), buffer)
        for buffer, named in ((False, model.named_parameters()), (True, model.named_buffers()))
        for name, tensor in named
    }
    rows = {(name, row.shape, row.buffer) for name, row in table(args).items()}
    if different := sorted({name for name, *_ in tensors ^ rows}):
        whose = f"the decoder of the family {args.family}, {decoder.__module__}.{decoder.__qualname__},"
        rule = f"{whose} and the rows of the family differ in {first_few(different, 3)}"
        fix = "give each parameter and buffer a row with its name and shape, and each row its tensor"
        raise ConfigError(Problem(rule, fix))
    model.to(dtype)
    wide = buffer_dtype(dtype)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(wide) if buffer.is_floating_point() else buffer)
    return model


def buffer_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of floating-point buffers, in memory and in files, in a model of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)
