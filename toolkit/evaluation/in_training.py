"""Run lm-eval tasks on the model in training, on any mesh, without an export.

Every rank runs all of lm-eval and gets all scores; the forward passes are divided among data-parallel ranks.
The head computes the scores instead of the training loss, so they are correct on any mesh that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.config.local_paths import expand_user
from toolkit.config.training import Evaluation
from toolkit.data.tokenizers.tokenizer import Tokenizer
from toolkit.errors import ConfigError, DataError, Problem, ToolkitError, first_few
from toolkit.evaluation.lm_eval import PreparedTasks, TaskModel, load_tasks, values
from toolkit.evaluation.row_scores import RowScorer, scores_for_losses
from toolkit.parallel.mesh import Mesh
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, Objective
from toolkit.train_step import TrainState


class _Stopped(ToolkitError):
    """Raised on all ranks if some rank was asked to stop."""


class _Scores(Objective):
    """Shards the field ``rows`` of a micro-batch along with its tokens."""

    reduction = "none"
    fields = token_fields = ("rows",)


class _PartsScorer(RowScorer):
    """Scores rows with the model in training. ``stop`` is called before each batch."""

    stop: Callable[[], bool] = staticmethod(lambda: False)

    def __init__(self, model_parts: ModelParts, *, multiple: int, few_shapes: bool, **ranks: Any):
        super().__init__(is_loss_rank=model_parts.is_loss_rank, **ranks)
        self.multiple, self.few_shapes = multiple, few_shapes
        self._model_parts = model_parts

    def _scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor] | None:
        stops = torch.tensor(float(self.stop()), device=self.device)
        dist.all_reduce(stops)
        if stops:
            raise _Stopped
        parts = self._model_parts
        batch = parts.prepare({**batch, "positions": None, "documents": None}, self.device)
        rows_BS = batch["rows"]
        with ExitStack() as stack:
            for model in parts.models:
                stack.enter_context(scores_for_losses(model.output))
            scores_T2 = parts.forward(batch)
        return None if scores_T2 is None or rows_BS is None else (scores_T2, rows_BS)


class InTraining:
    """The tasks of ``options``, which are loaded once.

    ``best`` is the metric of the best checkpoint, or "". Rows have at most ``length`` tokens. Rows are padded
    to a length that tp and cp can shard or, if kernels have static shapes, to a few multiples of
    ``static_length``.

    Attributes:
        best_of: what ``best`` is measured on, or None if it is not a score of a task.

    Raises:
        ConfigError: a task does not exist, generates text, or lacks the metric ``best``.
        DataError: a task cannot be loaded.
    """

    def __init__(
        self,
        options: Evaluation,
        tokenizer: Tokenizer,
        model_parts: ModelParts,
        mesh: Mesh,
        device: torch.device,
        *,
        best: str,
        length: int,
        static_length: int | None,
    ):
        self._options, self._model_parts = options, model_parts
        folder = expand_user(options.task_folder) if options.task_folder else None
        tasks = load_tasks(options.tasks or [], folder=folder, key="evaluation.tasks")
        self._tasks = PreparedTasks(tasks, few_shot=options.few_shot, limit=options.limit)
        if name := self._tasks.first_that_generates():
            fix = "remove it, and use `llama-toolkit evaluate` on checkpoints"
            raise ConfigError(Problem("it generates text", fix, "evaluation.tasks", name))
        shards = model_parts.shards
        sharded = (shards.chunks if shards else 1) * (mesh.tp.size() if mesh.tp else 1)
        multiple = static_length or sharded
        self._scorer = _PartsScorer(
            model_parts, batch_size=options.batch_size, device=device, multiple=multiple,
            few_shapes=static_length is not None, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size,
        )  # fmt: skip
        self._model = TaskModel(self._scorer, None, tokenizer, length=length // multiple * multiple)
        self._best, self.best_of, self._sign = best, None, 1
        if best.startswith("eval/"):
            higher = self._tasks.higher_is_better(*best.split("/")[1:3])
            if higher is None:
                rule = "lm-eval does not know this metric of the task, or whether higher is better"
                fix = "name another metric"
                raise ConfigError(Problem(rule, fix, "checkpoint.keep_best_metric", best))
            self._sign = -1 if higher else 1
            self.best_of = f"{best} (few_shot {options.few_shot}, limit {options.limit})"

    def due(self, step: int, *, last: bool) -> bool:
        return last or step % self._options.freq == 0

    def run(self, state: TrainState, *, stop: Callable[[], bool]) -> dict[str, float] | None:
        """Return the scores, "eval/TASK/METRIC", and record the best one in ``state``; None if ``stop``
        returned True on some rank before the end.

        Raises:
            DataError: a task cannot be run, or the metric of the best checkpoint is not among its scores.
        """
        self._scorer.stop = stop
        try:
            with self._model_parts.evaluating(_Scores()):
                results = self._tasks.run(self._model)
        except _Stopped:
            return None
        scores = {
            f"eval/{task}/{metric}" + ("" if kind == "none" else f"/{kind}"): float(value)
            for task, metric, kind, value in values(results)
        }
        if self.best_of:
            if self._best not in scores:
                rule = f"checkpoint.keep_best_metric: there is no {self._best}"
                raise DataError(f"{rule}\n  fix:  use one of {first_few(list(scores), 8)}")
            state.note_best(self._sign * scores[self._best])
        return scores
