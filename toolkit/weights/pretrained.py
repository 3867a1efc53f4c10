"""Load pretrained weights into a model before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.distributed.agreement import Ranks
from toolkit.distributed.dtensor import Fillable
from toolkit.finetune.parameters import is_added
from toolkit.models.parameters import is_classifier_head
from toolkit.parallel.model_parts import ModelParts
from toolkit.weights.load import load_weights, open_on_all_ranks
from toolkit.weights.safetensors import SafetensorsFolder
from toolkit.weights.source import WeightSource
from toolkit.weights.views import Resized, Subset


def load_hugging_face(
    model_parts: ModelParts,
    folder: Path,
    *,
    broadcast: bool,
    group: dist.ProcessGroup,
    vocab_size: int | None = None,
) -> None:
    """Load a Hugging Face folder into the model; with ``broadcast``, only rank 0 needs access to it.

    ``group`` has all ranks and supports CPU tensors. If the embedding has fewer rows than ``vocab_size``, the
    missing rows of embedding and head are the mean of the existing ones.

    Raises:
        DataError: on every rank: the folder is damaged or does not fit the model.
    """

    def open_folder() -> WeightSource:
        source: WeightSource = SafetensorsFolder(folder)
        return Resized(source, vocab_size) if vocab_size and vocab_size > source.args.vocab_size else source

    source = open_on_all_ranks(open_folder, only_rank_0=broadcast, group=group)
    load_base_weights(model_parts, source, broadcast=broadcast, group=group)


def load_base_weights(
    model_parts: ModelParts, source: WeightSource | None, *, broadcast: bool = False, group: dist.ProcessGroup
) -> None:
    """Load ``source`` into the model, except parameters added by fine-tuning; with ``broadcast``, only rank 0
    needs access to it. A classifier does not load the head of a language model or of another classifier.

    Raises:
        DataError: on every rank: the weights are damaged or do not fit the model.
    """
    args = model_parts.models[0].args
    headless = Ranks(group).on_rank_0(
        lambda: source is not None and bool(args.classifier) and source.args.classifier != args.classifier
    )
    if headless and source is not None:
        source = Subset(source, [name for name in source.tensors if not is_classifier_head(name, args)])
    tensors: dict[str, Tensor] = {
        name: parameter
        for name, parameter in (*model_parts.named_parameters(), *model_parts.named_buffers())
        if not is_added(name) and not (headless and is_classifier_head(name, args))
    }
    load_weights(source, dict(load_targets(tensors.items())), broadcast_from_rank_0=broadcast, group=group)
    model_parts.refresh_tied_copies(tensors, dict(model_parts.tied_copies()))


def load_targets(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Fillable]]:
    """Yield tensors to load into; 4-bit weights are wrapped so that loaded values are quantized."""
    for name, tensor in named:
        if tensor.dtype == torch.uint8:
            from toolkit.finetune.nf4 import PackedWeight

            yield name, PackedWeight(tensor)
        else:
            yield name, tensor
