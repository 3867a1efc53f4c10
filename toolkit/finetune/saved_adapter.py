"""Adapters on disk: checkpoints of runs with an adapter, and PEFT folders."""

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
from toolkit.weights.source import Region, StoredTensor


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model of ``args``, as a :class:`~toolkit.weights.source.WeightSource`.

    Attributes:
        values: parameters added by ``options``, and parameters of the model trained with them; on the
            CPU.
        base: ``place`` and ``fingerprint`` of the base model, as far as known.
        run: ``run`` in the manifest of the run that trained it.
    """

    place: Path
    args: ModelArgs
    options: Finetune
    values: Mapping[str, Tensor]
    base: Mapping[str, str] | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return {name: StoredTensor(tuple(it.shape), it.dtype) for name, it in self.values.items()}

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        """See :meth:`toolkit.weights.source.WeightSource.read`."""
        value = self.values[name]
        region = whole(tuple(value.shape)) if region is None else region
        return new_output(tuple(value.shape), value.dtype, region, out).copy_(value[tuple(region)])


def find_adapter(path: Path) -> Path | None:
    """Return the PEFT folder, or the step-N of a run with an adapter, at ``path``; None if there is neither.

    Raises:
        CheckpointError, DataError: the adapter is damaged.
    """
    if is_peft_folder(path):
        return path
    step = find_checkpoint(path)
    return step if step is not None and "base" in open_checkpoint(step, verify=False)[0]["run"] else None
