"""Pipeline parallelism: blocks are assigned to stages on different ranks and run by torch's schedules.

All micro-batches of a step, including accumulated ones, pass through one run of the schedule, because each
run reduces gradients once, at its end. Stages have static shapes: the first takes tokens (b, S), the others
take hidden states (b, S, D), with S sharded by tensor parallelism. The last returns the loss of its
micro-batch, from which the objective is computed. All ranks of a pipeline read positions, documents and
labels and pass them to every stage.

If the head is tied and not on the stage of the embedding, it is a copy with the same initial weights. The two
gradients are summed, so that both get the same updates. The two ranks add in different orders, but addition
of two values is commutative, so the result is bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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

if TYPE_CHECKING:  # imported only by runs that use it
    from toolkit.parallel.bitwise import BitwiseSums

TIED = "tok_embeddings.weight"


def keep_stage(model: Decoder, modules: Sequence[str]) -> None:
    """Remove all modules but a stage's ``modules`` from ``model``, on the meta device, in place.

    A tied head without the embedding gets its own weight, the copy.
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


class _Stage(PipelineStage):
    """A pipeline stage. With bitwise sums, it reduces the gradients of each batch, not only those of a step.

    The leaves of the sums are then the gradients of batches, so their number does not depend on
    ``per_batch``, the number of micro-batches per batch.
    """

    bitwise: BitwiseSums | None = None
    per_batch = 1

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        if self.bitwise is not None:
            batch, part = divmod(fwd_chunk_id, self.per_batch)
            self.bitwise.seed(batch, self.stage_index * self.per_batch + part)
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        done = bwd_chunk_id + 1
        if self.bitwise is not None and done % self.per_batch == 0 and done < (self.chunks or 0):
            self.bitwise.last = False
            self.perform_reduce_grad(1)
            self.bitwise.last = True


class Pipeline(ModelParts):
    """The pipeline stages on this rank.

    Args:
        models: this rank's stages, in the order of its entry in ``stages_of_ranks``.
        stages_of_ranks: the stages of each rank.
        schedule: name of torch's schedule; ``csv`` is a file with a custom schedule to use instead.
        micro_batch: samples per micro-batch of the schedule, which divide those of a step.
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
        # The ranks of a tp group have the same loss, so only one of them counts.
        self.is_loss_rank = self.last in self.stages and (mesh.tp is None or mesh.tp.get_local_rank() == 0)
        self.schedule: Any = None  # built in the first step, when the shapes are known
        self._scale = torch.ones((), dtype=torch.float64, device=device)
        self._rows_per_batch = 0
        self._totals = torch.zeros(1, 1 + len(objective.names), dtype=torch.float64, device=device)
        self._fields: MicroBatch = {}

    # Parameters

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
        if not self.args.tie_embeddings:
            return
        first, last = self.owner[0], self.owner[self.last]
        names = sorted(name for name in tensors if TIED in name)
        sources = [local(tensors[name]) for name in names] if self.rank == first else []
        targets = [local(copies[name]) for name in sorted(copies)] if self.rank == last else []
        if first == last:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)
            return
        for source in sources:
            dist.send(source.to(self.device), group=self.group, group_dst=last)
        for target in targets:
            received = torch.empty_like(target, device=self.device)
            dist.recv(received, group=self.group, group_src=first)
            target.copy_(received)

    # Training step

    def _micro_batches(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[int, int, MicroBatch]]:
        for index, batch in enumerate(batches):
            for part, micro_batch in enumerate(self._split(batch)):
                yield index, part, micro_batch

    def _backward(self, batches: Sequence[MicroBatch], scale: Tensor) -> list[Tensor]:
        split = [micro_batch for _, _, micro_batch in self._micro_batches(batches)]
        split = [self.objective.with_reference(batch, self.models, self.forward) for batch in split]
        tokens, positions, documents, labels = self._inputs(split)
        self._fields = {name: _concat(split, name) for name in self.objective.fields}
        del split
        self._scale, self._rows_per_batch = scale, len(tokens) // len(batches)
        if self.schedule is None:
            self.schedule = self.new_schedule(len(tokens) // self.micro_batch, tokens.shape[1])
        self._totals = self._totals.new_zeros(len(batches), self._totals.shape[1])
        extra = {"positions": positions, "documents": documents, "labels": labels}
        self.schedule.step(
            *([tokens] if 0 in self.stages else []),
            target=torch.arange(len(tokens), device=self.device) if self.last in self.stages else None,
            return_outputs=False,
            **{name: x for name, x in extra.items() if x is not None},
        )
        self._add_tied_gradients()
        first, *others = self._totals * self.is_loss_rank
        first = self._with_block_metrics(first)  # of all batches
        return [first, *(F.pad(row, (0, len(first) - len(row))) for row in others)]

    def _inputs(self, batches: Sequence[MicroBatch]) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Concatenate the step's micro-batches; the schedule splits them again."""
        tokens, labels, positions = (_concat(batches, name) for name in ("tokens", "labels", "positions"))
        assert tokens is not None and labels is not None
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if len(positions) < len(tokens):  # one row, shared by all rows of a micro-batch
            positions = positions[:1].expand_as(tokens)
        return tokens, positions, _concat(batches, "documents"), labels

    def _split(self, batch: MicroBatch) -> list[MicroBatch]:
        """Split the rows of ``batch`` into the micro-batches of the schedule."""
        tokens = batch["tokens"]
        assert tokens is not None
        fields = {
            name: x.split(self.micro_batch)
            for name, x in batch.items()
            if x is not None and len(x) == len(tokens)
        }
        return [batch | dict(zip(fields, rows, strict=True)) for rows in zip(*fields.values(), strict=True)]

    def new_schedule(self, count: int, length: int) -> Any:
        """Build this rank's schedule of ``count`` micro-batches of ``length`` tokens."""
        tokens = torch.empty(self.micro_batch, length, dtype=torch.int64, device="meta")
        hidden = self._hidden(self.micro_batch, length, "meta").requires_grad_()
        loss_dtype = torch.promote_types(self.hidden_dtype, torch.float32)
        head = self.stages[self.last].output if self.last in self.stages else None
        size = self.micro_batch * length
        shapes = {"none": (size,), "pairs": (size, 2), "scores": (self.micro_batch, length, 1)}
        shape = shapes.get(head.reduction, ()) if head is not None else ()
        loss = torch.empty(shape, dtype=loss_dtype, device="meta", requires_grad=True)
        stages = [
            _Stage(
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
        for stage in stages:
            stage.bitwise, stage.per_batch = self.bitwise, self._rows_per_batch // self.micro_batch
        options: dict[str, Any] = {
            "n_microbatches": count,
            "loss_fn": self._scaled_loss,
            "scale_grads": False,
        }
        if self.csv:
            return self._load_schedule(self.csv, ScheduleRuntime(stages, **options), stages, count)
        schedule = get_schedule_class(self.schedule_name)
        return schedule(stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages, **options)

    def _load_schedule(self, csv: Path, schedule: Any, stages: Sequence[PipelineStage], count: int) -> Any:
        """Load a schedule from a file; torch validates it.

        Raises:
            ConfigError: the file is not a schedule for these stages and micro-batches; raised on every rank.
        """
        # The file may assign stages in a V, unlike torch's default.
        for each in (schedule, *stages):
            each.stage_index_to_group_rank = self.owner
        try:
            load_schedule(schedule, str(csv))
            problem = "it assigns other stages to the ranks"
        except Exception as error:  # torch raises almost any exception for a malformed file
            problem = f"torch rejects it: {str(error).partition(chr(10))[0]}"
        else:
            if schedule.stage_index_to_group_rank == self.owner:
                return schedule
        ranks = ", ".join(f"{stage} on rank {rank}" for stage, rank in self.owner.items())
        fix = f"correct it for {count} micro-batches through the stages {ranks}"
        key = "parallelism.pipeline_parallel_schedule_csv"
        raise ConfigError(Problem(problem, fix, key, str(csv)))

    def _scaled_loss(self, output: Tensor, rows: Tensor) -> Tensor:
        """Return the scaled loss of a micro-batch; ``rows`` are its row indices within the step."""
        fields = {name: None if x is None else x[rows] for name, x in self._fields.items()}
        loss, sums = self.objective(output, fields)
        self._totals.index_add_(0, rows[:1] // self._rows_per_batch, sums[None])
        return loss * self._scale.to(loss.dtype)

    def _add_tied_gradients(self) -> None:
        """Set the gradients of the tied embedding and of its copy to their sum."""
        if not self.args.tie_embeddings:
            return
        first, last = self.owner[0], self.owner[self.last]
        tied = [parameter for name, parameter in self.named_parameters() if name == TIED]
        tied += [parameter for _, parameter in self.tied_copies()]
        if not tied or not tied[0].requires_grad:
            return
        gradients = [local(parameter.grad) for parameter in tied]  # type: ignore[arg-type]
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

    # Evaluation

    def loss(self, batch: MicroBatch) -> Tensor:
        batch = self.objective.with_reference(batch, self.models, self.forward)
        output = self.forward(batch)
        if output is None:
            return self._totals.new_zeros(1 + len(self.objective.names))
        return self.objective(output, batch)[1] * self.is_loss_rank

    def forward(self, batch: MicroBatch) -> Tensor | None:
        """Run ``batch``, of any shape, through all stages in turn. Returns the output on the rank of the last
        stage."""
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


def _concat(batches: Sequence[MicroBatch], name: str) -> Tensor | None:
    tensors = [batch[name] for batch in batches]
    return torch.cat(tensors) if tensors[0] is not None else None  # type: ignore[arg-type]
