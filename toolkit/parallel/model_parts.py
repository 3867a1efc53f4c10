"""This rank's part of the model, with methods that run batches.

The part is the whole model or some pipeline stages (:mod:`toolkit.parallel.pipeline_parallel`). Losses are
sums: the sum of all ranks' values is the value of the batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from toolkit.config.parallelism import Parallelism
from toolkit.distributed.dtensor import clean_name
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import spec
from toolkit.parallel.fsdp import begin_micro_batch
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.objective import MicroBatch, Objective

if TYPE_CHECKING:  # imported only by runs that use them
    from toolkit.parallel.bitwise import BitwiseSums
    from toolkit.parallel.embedding_noise import EmbeddingNoise
    from toolkit.parallel.expert_load import ExpertLoad
    from toolkit.parallel.sequence_shards import SequenceShards


class ModelParts(ABC):
    """The stages of a model on this rank.

    Attributes:
        models: the stages, in order.
        objective: the objective computed from the last stage's output.
        names: metrics of the objective and of blocks, logged in addition to the loss.
        is_loss_rank: whether this rank counts the labels that its pp and tp groups share.
        after_update: functions to call after each optimizer step.
        expert_load: counts the load of experts, in a model that has any.
        bitwise: the sums of ``debug.bitwise_data_parallel``.
        noise: the noise of embeddings in training.
        connect: function to call after parameters got new storage, for converters that refer to it.
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
        self.expert_load: ExpertLoad | None = None
        self.bitwise: BitwiseSums | None = None
        self.noise: EmbeddingNoise | None = None
        self.connect: Callable[[], object] | None = None
        args = models[0].args
        self._block_metrics = tuple(spec(args.family).metric_names(args))
        self.names = (*objective.names, *self._block_metrics)
        self.is_loss_rank = mesh.is_loss_rank
        self.dp_rank, self.coordinates = mesh.dp_rank, mesh.coordinates
        self.shards = shards

    def track_experts(self, expert_load: ExpertLoad) -> None:
        """Log the losses of routers, and count the load of experts."""
        self.expert_load = expert_load
        self._block_metrics += expert_load.losses.names
        self.names = (*self.objective.names, *self._block_metrics)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with clean names; every parameter of the model is on some rank."""
        for model in self.models:
            for name, parameter in model.named_parameters():
                yield clean_name(name), parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's buffers with clean names."""
        for model in self.models:
            for name, buffer in model.named_buffers():
                yield clean_name(name), buffer

    def tied_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the copies of tied parameters, by the names of their originals."""
        return iter(())

    def refresh_tied_copies(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Set each tensor of ``copies`` to the tensor of the same name in ``tensors``, even across ranks."""
        assert not copies, "a whole model has no tied copies"

    def reset_float8_scales(self) -> None:
        """Discard the float8 scales computed before new weights were loaded."""
        for model in self.models:
            for module in model.modules():
                if reset := getattr(module, "reset_scale", None):
                    reset()

    def prepare(self, batch: MicroBatch, device: torch.device) -> MicroBatch:
        """Return the micro-batch on ``device``, with this rank's shard of its sequences. Document ids are not
        sharded, because attention needs all of them."""
        batch = {name: None if value is None else _to_device(value, device) for name, value in batch.items()}
        batch = self.objective.prepare(batch)
        if self.shards is None:
            return batch
        tokens = batch["tokens"]
        assert tokens is not None
        if batch["positions"] is None:
            batch["positions"] = torch.arange(tokens.shape[1], device=device)[None]
        names = ("tokens", "labels", "positions", *self.objective.token_fields)
        fields = {name: batch[name] for name in names}
        return batch | {name: None if x is None else self.shards.shard(x) for name, x in fields.items()}

    def measure(self, batches: Iterable[MicroBatch]) -> None:
        """Sum the objective's measurements over the prepared micro-batches of all ranks, before their
        losses."""
        objective = self.objective
        if not objective.measures:
            return
        with torch.no_grad():
            rows = []
            for index, part, batch in self._micro_batches(batches):
                if self.bitwise:
                    self.bitwise.seed(index, part)
                rows.append(objective.measure(batch, self.models, self.forward))
        device = next(self.models[0].parameters()).device if not rows else rows[0].device
        sums = torch.zeros(1, objective.measures, dtype=torch.float64, device=device)
        sums = torch.cat([sums, *(row[None] * self.is_loss_rank for row in rows)])
        if self.bitwise:
            objective.measured = self.bitwise.exact_total(sums)
        else:
            objective.measured = sums.sum(0)
            dist.all_reduce(objective.measured)
        self.end_evaluation()

    def _micro_batches(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[int, int, MicroBatch]]:
        """Yield the micro-batches that run at a time, with the index of the batch and that within it."""
        return ((index, 0, batch) for index, batch in enumerate(batches))

    def backward(
        self, batches: Sequence[MicroBatch], scale: Tensor, block_scale: Tensor | None = None
    ) -> Tensor:
        """Run forward and backward of a step's prepared micro-batches, with the objective multiplied by
        ``scale`` and the losses of blocks by ``block_scale``, by default the same.

        Gradients are summed over all ranks. Returns this rank's contribution to the unscaled sums of the loss
        and of ``names``, one row for each micro-batch, as (rows, 1 + names) fp64.
        """
        if self.bitwise:
            self.bitwise.begin_step()
        self.measure(batches)
        stages = [model.block_sums for model in self.models]
        if self.expert_load and self.expert_load.needs_pass:
            self._begin_noise(batches)
            self._count_loads(batches, scale.device)
        self._begin_noise(batches)
        for sums in stages:
            sums.scale = scale if block_scale is None else block_scale
        try:
            rows = torch.stack(self._backward(batches, scale))
        finally:
            for sums in stages:
                sums.scale = None
        if self._block_metrics and block_scale is not None:  # callers multiply all sums by ``scale``
            rows[:, -len(self._block_metrics) :] *= block_scale / scale
        return rows

    def _begin_noise(self, batches: Sequence[MicroBatch]) -> None:
        if self.noise:
            self.noise.begin(batches)

    def _with_block_metrics(self, objective: Tensor) -> Tensor:
        """Append the sums of blocks since the last call to those of the objective."""
        stages = [model.block_sums for model in self.models]
        metrics = [
            torch.stack([sums.take(name, objective) for sums in stages]).sum() for name in self._block_metrics
        ]
        return torch.cat([objective, torch.stack(metrics)]) if metrics else objective

    def _count_loads(self, batches: Sequence[MicroBatch], device: torch.device) -> None:
        """Run forwards to count the loads of the global batch, for its balancing loss."""
        assert self.expert_load is not None
        if len(batches) == 1 and self.expert_load.one_stage:
            self.expert_load.set_shares(None)  # each layer counts in its forward
            return
        for model in self.models:
            model.block_sums.counts = True
        try:
            with torch.no_grad():
                for batch in batches:
                    self.forward(batch)
        finally:
            for model in self.models:
                model.block_sums.counts = False
        self.end_evaluation()
        counts = self.expert_load.take(device)
        dist.all_reduce(counts)
        self.expert_load.set_shares(counts)

    @abstractmethod
    def _backward(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        """Implement :meth:`backward`; return the rows, with metrics of blocks not yet scaled."""

    @abstractmethod
    def forward(self, batch: MicroBatch) -> Tensor | None:
        """Run a prepared micro-batch; return the output of the last stage, if it is on this rank."""

    @abstractmethod
    def loss(self, batch: MicroBatch) -> Tensor:
        """Return this rank's contribution to the objective's sums over a prepared batch, without
        gradients."""

    @contextmanager
    def evaluating(self, objective: Objective | None = None) -> Iterator[Objective]:
        """Switch to evaluation mode, with ``objective`` instead of the run's, inside the context."""
        original, self.objective = self.objective, objective or self.objective
        for model in self.models:
            model.eval()
        try:
            yield self.objective
        finally:
            self.end_evaluation()
            self.objective = original
            for model in self.models:
                model.train()

    def end_evaluation(self) -> None:
        """Reshard after :meth:`loss`. Otherwise, units that expect a backward would stay gathered in the
        compute dtype, and a checkpoint would save the gathered parameters instead of the shards."""
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy ``x`` to ``device`` without blocking; CUDA requires pinned memory for this."""
    return (x.pin_memory() if device.type == "cuda" and x.is_cpu else x).to(device, non_blocking=True)


class SingleModel(ModelParts):
    """The whole model on this rank, running micro-batches one after another."""

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

    def _backward(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        rows = []
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            begin_micro_batch(self.model, self.parallelism, last=last)
            if self.bitwise:
                self.bitwise.last = last
                self.bitwise.seed(index)
            loss, sums = self._objective(batch)
            (loss * scale.to(loss.dtype)).backward()
            # Ranks of a tp group have the same loss.
            rows.append(self._with_block_metrics(sums * self.is_loss_rank))
        return rows

    def loss(self, batch: MicroBatch) -> Tensor:
        return self._objective(batch)[1] * self.is_loss_rank

    def _objective(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        batch = self.objective.with_reference(batch, self.models, self.forward)
        return self.objective(self.forward(batch), batch)

    def forward(self, batch: MicroBatch) -> Tensor:
        return self.model(
            batch["tokens"],
            positions=batch["positions"],
            documents=batch["documents"],
            labels=batch["labels"],
        )
