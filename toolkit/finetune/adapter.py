"""An adapter on disk: what a run of this toolkit has trained beside a model, or a folder of PEFT's.

It names its base: by a place, and by a fingerprint where it was trained here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.read_tensor import open_checkpoint
from toolkit.config.finetune import Finetune
from toolkit.finetune.peft_config import is_peft_folder
from toolkit.io.tensor_file import new_output, whole
from toolkit.models.common.args import ModelArgs
from toolkit.weights.open import find_checkpoint
from toolkit.weights.source import Region, Stored


@dataclass(frozen=True)
class Adapter:
    """``tensors`` of :class:`~toolkit.weights.source.WeightSource` are those of ``values``: parameters that
    ``options`` add to a model of ``args``, and others of the model that were trained with them. In memory,
    on the CPU."""

    place: Path
    args: ModelArgs
    options: Finetune
    values: Mapping[str, Tensor]
    base: Mapping[str, str] | None = None
    """``place`` and ``fingerprint`` of the model that it was trained on, as far as it tells."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """The manifest's entries of the run that trained it."""

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        return {name: Stored(tuple(it.shape), it.dtype) for name, it in self.values.items()}

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        """See :meth:`toolkit.weights.source.WeightSource.read`."""
        value = self.values[name]
        region = whole(tuple(value.shape)) if region is None else region
        return new_output(tuple(value.shape), value.dtype, region, out).copy_(value[tuple(region)])


def find_adapter(path: Path) -> Path | None:
    """PEFT's folder, or the step-N of an adapter of ours, that ``path`` is or stands for; None for others.

    Raises:
        CheckpointError, DataError: it is damaged.
    """
    if is_peft_folder(path):
        return path
    step = find_checkpoint(path)
    return step if step is not None and "base" in open_checkpoint(step, verify=False)[0]["run"] else None
