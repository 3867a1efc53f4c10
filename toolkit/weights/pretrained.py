"""Weights that a model begins with in place of its own initial ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.distributed.agreement import Ranks
from toolkit.distributed.dtensor import Filled
from toolkit.finetune.parameters import is_added
from toolkit.models.parameters import is_classifier_head
from toolkit.parallel.model_parts import ModelParts
from toolkit.weights.load import load_weights, open_alike
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource
from toolkit.weights.views import Only, Resized


def load_hugging_face(
    model_parts: ModelParts,
    folder: Path,
    *,
    broadcast: bool,
    group: dist.ProcessGroup,
    vocab_size: int | None = None,
) -> None:
    """Fill the model with the weights of a Hugging Face folder, which with ``broadcast`` rank 0 alone sees.

    ``group`` has all ranks and carries CPU tensors. Where the embedding has fewer rows than ``vocab_size``,
    the others are their mean, and so are the head's.

    Raises:
        DataError: the folder is damaged or does not fit the model; alike on every rank.
    """

    def opened() -> WeightSource:
        source: WeightSource = SafetensorsFolder(folder)
        return Resized(source, vocab_size) if vocab_size and vocab_size > source.args.vocab_size else source

    source = open_alike(opened, on_rank_0_alone=broadcast, group=group)
    fill(model_parts, source, broadcast=broadcast, group=group)


def fill(
    model_parts: ModelParts, source: WeightSource | None, *, broadcast: bool = False, group: dist.ProcessGroup
) -> None:
    """Fill the model, save for what fine-tuning adds to it, from ``source``, which with ``broadcast`` rank 0
    alone has. Of a language model, and of a classifier of other classes, a classifier leaves the head.

    Raises:
        DataError: the weights are damaged or do not fit the model; alike on every rank.
    """
    args = model_parts.models[0].args
    headless = Ranks(group).on_rank_0(
        lambda: source is not None and bool(args.classifier) and source.args.classifier != args.classifier
    )
    if headless and source is not None:
        source = Only(source, [name for name in source.tensors if not is_classifier_head(name, args)])
    tensors: dict[str, Tensor] = {
        name: parameter
        for name, parameter in (*model_parts.named_parameters(), *model_parts.named_buffers())
        if not is_added(name) and not (headless and is_classifier_head(name, args))
    }
    load_weights(source, dict(to_fill(tensors.items())), broadcast_from_rank_0=broadcast, group=group)
    model_parts.refresh_tied_copies(tensors, dict(model_parts.tied_copies()))


def to_fill(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Filled]]:
    """Tensors as they are filled: weights in 4 bits by the numbers that they are made from."""
    for name, tensor in named:
        if tensor.dtype == torch.uint8:
            from toolkit.finetune.nf4 import Packed

            yield name, Packed(tensor)
        else:
            yield name, tensor
