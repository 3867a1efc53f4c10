"""The parts of the model that this rank has, and how a batch goes through them.

One model, or under pipeline parallelism some of its stages (:mod:`toolkit.parallel.pipeline_parallel`).
Losses are sums, of which each rank returns a share: over the world they add up to the batch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from toolkit.config.parallelism import Parallelism
from toolkit.distributed.dtensor import clean_name
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import spec
from toolkit.parallel.fsdp import begin_micro_batch
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.objective import MicroBatch, Objective

if TYPE_CHECKING:  # read only by runs that split sequences
    from toolkit.parallel.sequence_shards import SequenceShards


class ModelParts(ABC):
    """The stages of a model that this rank has.

    Attributes:
        models: the stages, in order.
        objective: what is made of the last stage's output.
        names: what is reported beside the loss, by the objective and by blocks.
        is_loss_rank: this rank's labels count, and not the same ones of another rank of its pp and tp groups.
        after_update: to be called after each update of the parameters.
        connect: to be called when the parameters have got storage later, for what converters keep of them.
    """

    def __init__(
        self, models: Sequence[Decoder], mesh: Mesh, shards: SequenceShards | None, objective: Objective
    ):
        self.models = models
        self.objective = objective
        for model in models:
            if model.output is not None:
                model.output.reduction = objective.reduction
        self.after_update: list[Callable[[], None]] = []
        self.connect: Callable[[], object] | None = None
        args = models[0].args
        self._of_blocks = tuple(spec(args.family).reported(args))
        self.names = (*objective.names, *self._of_blocks)
        self.is_loss_rank = mesh.is_loss_rank
        self.dp_rank, self.coordinates = mesh.dp_rank, mesh.coordinates
        self.shards = shards

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank by clean names, each of the model's on some rank."""
        for model in self.models:
            for name, parameter in model.named_parameters():
                yield clean_name(name), parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank by clean names."""
        for model in self.models:
            for name, buffer in model.named_buffers():
                yield clean_name(name), buffer

    def tied_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters beside these, by the names of those that they repeat on another rank, or here."""
        return iter(())

    def refresh_tied_copies(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Set the tensors of ``copies`` to those of the same names in ``tensors``, wherever these are."""
        assert not copies, "a whole model has none"

    def forget_scales(self) -> None:
        """Leave aside what float8 has found of weights that others have been loaded over since."""
        for model in self.models:
            for module in model.modules():
                if forget := getattr(module, "forget_scale", None):
                    forget()

    def prepare(self, batch: MicroBatch, device: torch.device) -> MicroBatch:
        """The micro-batch on ``device``, cut to what this rank computes of its sequences. Documents stay
        whole, since attention looks at all of them."""
        batch = {name: None if value is None else _moved(value, device) for name, value in batch.items()}
        batch = self.objective.prepare(batch)
        if self.shards is None:
            return batch
        tokens = batch["tokens"]
        assert tokens is not None
        if batch["positions"] is None:
            batch["positions"] = torch.arange(tokens.shape[1], device=device)[None]
        cut = {name: batch[name] for name in ("tokens", "labels", "positions", *self.objective.token_fields)}
        return batch | {name: None if x is None else self.shards.cut(x) for name, x in cut.items()}

    def backward(self, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """Forward and backward of a step's prepared micro-batches, losses times ``scale``.

        Gradients are summed over all ranks. Returns this rank's share of the sums of objective and blocks
        without ``scale``, (1 + names,) fp64, the objective's loss first.
        """
        sums = [model.block_sums for model in self.models]
        for it in sums:
            it.scale = scale
        try:
            objective = self._backward(batches, scale)
        finally:
            for it in sums:
                it.scale = None
        blocks = [torch.stack([it.take(name, objective) for it in sums]).sum() for name in self._of_blocks]
        return torch.cat([objective, torch.stack(blocks)]) if blocks else objective

    @abstractmethod
    def _backward(self, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """See :meth:`backward`; returns the sums of the objective alone."""

    @abstractmethod
    def loss(self, batch: MicroBatch) -> Tensor:
        """This rank's share of the objective's sums of a prepared batch, for use without gradients."""

    def end_evaluation(self) -> None:
        """Free what :meth:`loss` has gathered: units that wait for their backward would stay gathered, full
        copies in the computing precision, which a checkpoint would then save in place of the shards."""
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``, without a wait: of memory that is not page-locked CUDA makes a copy of its own,
    piece by piece, each when what the device has to do before is done."""
    return (x.pin_memory() if device.type == "cuda" and x.is_cpu else x).to(device, non_blocking=True)


class SingleModel(ModelParts):
    """The whole model on this rank; micro-batches one after the other."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        shards: SequenceShards | None,
        parallelism: Parallelism,
        objective: Objective,
    ):
        super().__init__([model], mesh, shards, objective)
        self.model = model
        self.parallelism = parallelism

    def _backward(self, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        total = torch.zeros(1 + len(self.objective.names), dtype=torch.float64, device=scale.device)
        for index, batch in enumerate(batches):
            begin_micro_batch(self.model, self.parallelism, last=index == len(batches) - 1)
            loss, sums = self._objective(batch)
            (loss * scale.to(loss.dtype)).backward()
            total += sums
        return total * self.is_loss_rank  # ranks of a tp group have the same loss

    def loss(self, batch: MicroBatch) -> Tensor:
        return self._objective(batch)[1] * self.is_loss_rank

    def _objective(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        batch = self.objective.with_reference(batch, self.models, self._forward)
        return self.objective(self._forward(batch), batch)

    def _forward(self, batch: MicroBatch) -> Tensor:
        return self.model(
            batch["tokens"],
            positions=batch["positions"],
            documents=batch["documents"],
            labels=batch["labels"],
        )
