"""Pipeline parallelism: the blocks in stages over ranks, run by torch's schedules.

All micro-batches of a step, accumulated ones included, go through one run of the schedule, since each run
reduces gradients once at its end. Stages have static shapes: the first takes tokens (b, S), the others
hidden states (b, S, D), of which tensor parallelism holds a piece of S; the last returns its micro-batch's
loss, of which the objective makes what is minimised. Every stage gets positions, documents and labels,
which all ranks of a pipeline have read.

A tied head lies on another stage than the embedding: it is a copy with the same initial weights, and the
gradients of both are added, so that both take the same updates. Which of the two ranks adds which to which
does not matter to the bit, since a sum of two numbers is the same either way around.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from toolkit.compat import ScheduleRuntime, load_schedule
from toolkit.distributed.collectives import wait_for_work
from toolkit.distributed.dtensor import local
from toolkit.errors import ConfigError, Problem
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, Objective
from toolkit.parallel.sequence_shards import SequenceShards

TIED = "tok_embeddings.weight"


def cut(model: Decoder, modules: Sequence[str]) -> None:
    """Leave of ``model``, on the meta device, the stage of these modules, in place.

    A tied head without the embedding gets a weight of its own, the copy.
    """
    if "tok_embeddings" not in modules:
        if model.args.tie_embeddings and model.output is not None:
            assert model.tok_embeddings is not None
            model.output.weight = nn.Parameter(torch.empty_like(model.tok_embeddings.weight))
        model.tok_embeddings = None
    for name in list(model.layers):
        if f"layers.{name}" not in modules:
            del model.layers[name]
    if "output" not in modules:
        model.norm = model.output = None


class Pipeline(ModelParts):
    """Stages of this rank, in the order of ``stages_of_ranks``, which has the stages of each rank.

    ``micro_batch`` are the samples of one. ``schedule`` is torch's name; ``csv`` a file of one's own in its
    place. ``hidden_dtype`` is that of hidden states.
    """

    def __init__(
        self,
        models: Sequence[Decoder],
        mesh: Mesh,
        shards: SequenceShards | None,
        objective: Objective,
        *,
        stages_of_ranks: Sequence[Sequence[int]],
        schedule: str,
        csv: Path | None,
        micro_batch: int,
        hidden_dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__(models, mesh, shards, objective)
        assert mesh.pp is not None
        self.group = mesh.pp.get_group()
        self.device = device
        self.hidden_dtype = hidden_dtype
        self.micro_batch = micro_batch
        self.schedule_name, self.csv = schedule, csv
        self.tp = mesh.tp.size() if mesh.tp else 1
        self.rank = mesh.pp.get_local_rank()
        self.owner = {stage: rank for rank, stages in enumerate(stages_of_ranks) for stage in stages}
        self.stages = dict(zip(stages_of_ranks[self.rank], models, strict=True))
        self.last = len(self.owner) - 1
        # Of a tp group, whose ranks have the same loss, one counts.
        self.is_loss_rank = self.last in self.stages and (mesh.tp is None or mesh.tp.get_local_rank() == 0)
        self.schedule: Any = None  # made at the first step, which knows its shapes
        self._scale = torch.ones((), dtype=torch.float64, device=device)
        self._total = torch.zeros(1 + len(objective.names), dtype=torch.float64, device=device)
        self._fields: MicroBatch = {}

    # What this rank has

    @property
    def args(self) -> Any:
        return self.models[0].args

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        copies = {parameter for _, parameter in self.tied_copies()}
        for name, parameter in super().named_parameters():
            if parameter not in copies:
                yield name, parameter

    def tied_copies(self) -> Iterator[tuple[str, nn.Parameter]]:
        head = self.stages[self.last].output if self.last in self.stages else None
        if self.args.tie_embeddings and head is not None and head.weight is not None:
            yield TIED, head.weight

    def refresh_tied_copies(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Set the tensors of ``copies`` to those of the same names in ``tensors``, wherever these are."""
        if not self.args.tie_embeddings:
            return
        first, last = self.owner[0], self.owner[self.last]
        mine = (
            [local(tensors[name]) for name in sorted(tensors) if TIED in name] if self.rank == first else []
        )
        theirs = [local(copies[name]) for name in sorted(copies)] if self.rank == last else []
        if first == last:
            for source, target in zip(mine, theirs, strict=True):
                target.copy_(source)
        for source in mine if first != last else []:
            dist.send(source.to(self.device), group=self.group, group_dst=last)
        for target in theirs if first != last else []:
            received = torch.empty_like(target, device=self.device)
            dist.recv(received, group=self.group, group_src=first)
            target.copy_(received)

    # A step

    def _backward(self, batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        pieces = [piece for batch in batches for piece in self._pieces(batch)]
        batches = [self.objective.with_reference(piece, self.models, self._forward) for piece in pieces]
        tokens, positions, documents, labels = self._inputs(batches)
        self._fields = {name: _joined(batches, name) for name in self.objective.fields}
        if self.schedule is None:
            self.schedule = self.new_schedule(len(tokens) // self.micro_batch, tokens.shape[1])
        self._scale = scale
        self._total.zero_()
        extra = {"positions": positions, "documents": documents, "labels": labels}
        self.schedule.step(
            *([tokens] if 0 in self.stages else []),
            target=torch.arange(len(tokens), device=self.device) if self.last in self.stages else None,
            return_outputs=False,
            **{name: x for name, x in extra.items() if x is not None},
        )
        self._add_tied_gradients()
        return self._total * self.is_loss_rank

    def _inputs(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """All rows of the step's micro-batches, as the schedule cuts them again."""
        tokens, labels, positions = (_joined(batches, name) for name in ("tokens", "labels", "positions"))
        assert tokens is not None and labels is not None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if len(positions) < len(tokens):  # one row for all of each micro-batch
            positions = positions[:1].expand_as(tokens)
        return tokens, positions, _joined(batches, "documents"), labels

    def _pieces(self, batch: MicroBatch) -> list[MicroBatch]:
        """The rows of ``batch`` as the micro-batches of the schedule."""
        tokens = batch["tokens"]
        assert tokens is not None
        parts = {
            name: x.split(self.micro_batch)
            for name, x in batch.items()
            if x is not None and len(x) == len(tokens)
        }
        return [batch | dict(zip(parts, piece, strict=True)) for piece in zip(*parts.values(), strict=True)]

    def new_schedule(self, count: int, length: int) -> Any:
        """The schedule of ``count`` micro-batches of ``length`` tokens on this rank."""
        tokens = torch.empty(self.micro_batch, length, dtype=torch.int64, device="meta")
        hidden = self._hidden(self.micro_batch, length, "meta").requires_grad_()
        loss_dtype = torch.promote_types(self.hidden_dtype, torch.float32)
        head = self.stages[self.last].output if self.last in self.stages else None
        shape = (self.micro_batch * length,) if head is not None and head.reduction == "none" else ()
        loss = torch.empty(shape, dtype=loss_dtype, device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                model,
                index,
                len(self.owner),
                self.device,
                input_args=(tokens if index == 0 else hidden,),
                output_args=(loss if index == self.last else hidden,),
                group=self.group,
            )
            for index, model in self.stages.items()
        ]
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": self._scaled, "scale_grads": False}
        if self.csv:
            return self._schedule_of_file(self.csv, ScheduleRuntime(stages, **options), stages, count)
        chosen = get_schedule_class(self.schedule_name)
        return chosen(stages[0] if issubclass(chosen, PipelineScheduleSingle) else stages, **options)

    def _schedule_of_file(self, csv: Path, schedule: Any, stages: Sequence[PipelineStage], count: int) -> Any:
        """Fill a schedule from a file, which torch checks.

        Raises:
            ConfigError: it is no schedule of these stages and micro-batches; alike on every rank.
        """
        # The file may place stages in a V, which is not what torch assumes.
        for each in (schedule, *stages):
            each.stage_index_to_group_rank = self.owner
        try:
            load_schedule(schedule, str(csv))
            fault = "it gives the ranks other stages"
        except Exception as error:  # torch raises nearly anything for what is malformed
            fault = f"torch refuses it: {str(error).partition(chr(10))[0]}"
        else:
            if schedule.stage_index_to_group_rank == self.owner:
                return schedule
        ranks = ", ".join(f"{stage} on rank {rank}" for stage, rank in self.owner.items())
        fix = f"correct it for {count} micro-batches through the stages {ranks}"
        key = "parallelism.pipeline_parallel_schedule_csv"
        raise ConfigError(Problem(fault, fix, key, str(csv)))

    def _scaled(self, output: Tensor, rows: Tensor) -> Tensor:
        """The loss of the rows that a micro-batch has of those of the step."""
        loss, sums = self.objective(output, {name: _rows(x, rows) for name, x in self._fields.items()})
        self._total += sums
        return loss * self._scale.to(loss.dtype)

    def _add_tied_gradients(self) -> None:
        """Give the embedding and its copy the sum of both gradients."""
        if not self.args.tie_embeddings:
            return
        first, last = self.owner[0], self.owner[self.last]
        mine = [parameter for name, parameter in self.named_parameters() if name == TIED]
        mine += [parameter for _, parameter in self.tied_copies()]
        if not mine or not mine[0].requires_grad:
            return
        gradients = [local(parameter.grad) for parameter in mine]  # type: ignore[arg-type]
        if first == last:
            total = gradients[0] + gradients[1]
            for gradient in gradients:
                gradient.copy_(total)
            return
        peer = last if self.rank == first else first
        sent = gradients[0].to(self.device).contiguous()
        received = torch.empty_like(sent)
        pair = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(pair):
            wait_for_work(work)
        gradients[0].add_(received.to(gradients[0].device))

    # Without gradients

    def loss(self, batch: MicroBatch) -> Tensor:
        batch = self.objective.with_reference(batch, self.models, self._forward)
        output = self._forward(batch)
        if output is None:
            return self._total.new_zeros(1 + len(self.objective.names))
        return self.objective(output, batch)[1] * self.is_loss_rank

    def _forward(self, batch: MicroBatch) -> Tensor | None:
        """The rows of ``batch`` through all stages in turn, at whatever shape they have; what the last gives,
        where it is."""
        tokens, positions, documents, labels = self._inputs([batch])
        hidden = tokens
        for index, model in self.stages.items():
            if index and self.owner[index - 1] != self.rank:
                hidden = self._hidden(len(tokens), tokens.shape[1], self.device)
                dist.recv(hidden, group=self.group, group_src=self.owner[index - 1])
            hidden = model(hidden, positions=positions, documents=documents, labels=labels)
            if index != self.last and self.owner[index + 1] != self.rank:
                dist.send(hidden, group=self.group, group_dst=self.owner[index + 1])
        return hidden if self.last in self.stages else None

    def _hidden(self, rows: int, length: int, device: torch.device | str) -> Tensor:
        return torch.empty(rows, length // self.tp, self.args.dim, dtype=self.hidden_dtype, device=device)


def _joined(batches: Sequence[MicroBatch], name: str) -> Tensor | None:
    parts = [batch[name] for batch in batches]
    return torch.cat(parts) if parts[0] is not None else None  # type: ignore[arg-type]


def _rows(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else x[rows]
