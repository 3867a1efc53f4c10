"""Compute the training loss on held-out corpora, without gradients, and the scores of a classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.config import Config
from toolkit.data.build_loader import validation_loader
from toolkit.data.run_data import BASE_CORPUS, RunData
from toolkit.metrics.summary import perplexity
from toolkit.models.from_config import pretrained_folder
from toolkit.optim.ema import WeightAverage
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, Objective, WeightedObjective, divisor
from toolkit.train_step import TrainState


class Validator:
    """Validates a run on its held-out corpus and, before the first and after the last step, on the base
    corpus if there is one."""

    def __init__(
        self,
        config: Config,
        data: RunData,
        model_parts: ModelParts,
        *,
        device: torch.device,
        dp_rank: int,
        dp_size: int,
        average: WeightAverage | None = None,
    ):
        self._options, self._model_parts, self._device = config.validation, model_parts, device
        self._average = average
        # The result of a pretrained model is compared with its initial loss.
        path = config.checkpoint.initial_load_path
        self._pretrained = pretrained_folder(config) is not None or path is not None
        loader = validation_loader(config, data, dp_rank=dp_rank, dp_size=dp_size)
        assert loader is not None, "validation.enable is true"
        self.loader = loader
        # Plain cross-entropy, without the teacher.
        self._objective = WeightedObjective() if config.distillation.enable else None
        self._base = validation_loader(config, data, dp_rank=dp_rank, dp_size=dp_size, table=BASE_CORPUS)

    def due(self, step: int, *, last: bool = False) -> bool:
        """Report whether to validate after ``step``; 0 means before the first step."""
        return last or (step % self._options.freq == 0 if step else self._pretrained)

    def run(self, state: TrainState, *, last: bool, stop: Callable[[], bool]) -> dict[str, float] | None:
        """Validate after the step of ``state``, and record the best and the initial losses in it.

        Returns the values to report, or None if ``stop`` returned True on some rank before the end.
        """
        steps, model_parts = self._options.steps, self._model_parts
        options = dict[str, Any](device=self._device, limit=None if steps == -1 else steps, stop=stop)
        values: dict[str, float] = {}
        result = validate(model_parts, self.loader, objective=self._objective, **options)
        if result and self._base and (last or state.step == 0):
            values = base_corpus_loss(model_parts, self._base, **options)
        values |= self._scores()
        averaged: dict[str, float] = {}
        if result and self._average and state.step:
            options["objective"] = self._objective
            averaged = validate_average(self._average, model_parts, self.loader, **options) or {}
            scores = self._scores() if averaged else {}
            averaged |= {name.removeprefix("validation_"): value for name, value in scores.items()}
        if result is None:
            return None
        if state.step and state.best_of == self.loader.identity:  # not the best of a task
            state.note_best(result["loss"])
        values = {f"validation_{name}": value for name, value in result.items()} | values
        values |= {f"validation_ema_{name}": value for name, value in averaged.items()}
        if state.step == 0:
            state.before = {key: values[name] for name, key in self._compared.items() if name in values}
        return values

    def _scores(self) -> dict[str, float]:
        """Return a classifier's scores since the last call."""
        classifier = self._model_parts.models[0].args.classifier
        if classifier is None or (classes := len(classifier.labels)) == 1:
            return {}
        return classifier_scores(self._model_parts, classes=classes, device=self._device)

    def initial_losses(self, state: TrainState) -> dict[str, float]:
        """Return the losses from before the first step, if they were measured on the same samples as now."""
        return {name: state.before[key] for name, key in self._compared.items() if key in state.before}

    @property
    def _compared(self) -> dict[str, str]:
        """Return the losses compared before and after training, each with the identity of its samples."""
        loaders = {"validation_loss": self.loader, "base_corpus_loss": self._base}
        return {name: f"{name} of {loader.identity}" for name, loader in loaders.items() if loader}


@torch.no_grad()
def validate(
    model_parts: ModelParts,
    batches: Iterable[MicroBatch],
    *,
    device: torch.device,
    limit: int | None,
    stop: Callable[[], bool] = lambda: False,
    objective: Objective | None = None,
) -> dict[str, float] | None:
    """Return the mean "loss" per token in nats, or the objective's means, over all ranks' micro-batches.

    At most ``limit`` micro-batches per rank are used. Every rank must have the same number of micro-batches,
    because each one gathers the sharded parameters. ``objective`` replaces the run's objective. Returns None
    if ``stop`` returned True on some rank before the end.
    """
    rows = []
    stops = torch.zeros((), device=device)

    def prepared() -> Iterator[MicroBatch]:
        for batch in islice(batches, limit):
            stops.fill_(stop())
            dist.all_reduce(stops)
            if stops:
                return
            yield model_parts.prepare(batch, device)

    with model_parts.evaluating(objective) as objective:
        model_parts.measure(prepared())
        for batch in prepared():
            count = objective.count([batch]) * model_parts.is_loss_rank
            rows.append(torch.cat([count.double()[None], model_parts.loss(batch)]))
    names = ("loss", *objective.names)
    sums = torch.stack([torch.zeros(1 + len(names), dtype=torch.float64, device=device), *rows])
    if model_parts.bitwise:
        sums = model_parts.bitwise.exact_total(sums)
    else:
        sums = sums.sum(0)
        dist.all_reduce(sums)
    means = (sums[1:] / divisor(sums[0])).tolist()
    return None if stops else dict(zip(names, means, strict=True))


def validate_average(
    average: WeightAverage, model_parts: ModelParts, batches: Iterable[MicroBatch], **options: Any
) -> dict[str, float] | None:
    """Call :func:`validate` with the average of the weights."""
    model_parts.end_evaluation()
    with average.applied():
        model_parts.reset_float8_scales()
        result = validate(model_parts, batches, **options)
    model_parts.reset_float8_scales()
    return result


class _NextToken(Objective):
    """Next-token loss, including models whose objective needs per-token losses."""

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return super().__call__(output.sum(), batch)


def base_corpus_loss(
    model_parts: ModelParts, batches: Iterable[MicroBatch], **options: Any
) -> dict[str, float]:
    """Return loss (nats per token) and perplexity on a corpus that is not trained on, with any adapter; empty
    if stopped before the end. ``options`` are passed to :func:`validate`."""
    result = validate(model_parts, batches, objective=_NextToken(), **options)
    if result is None:
        return {}
    loss = result["loss"]
    return {"base_corpus_loss": loss, "base_corpus_perplexity": perplexity(loss)}


def classifier_scores(model_parts: ModelParts, *, classes: int, device: torch.device) -> dict[str, float]:
    """Return accuracy and macro F1 of a classifier's predictions since the last call, over all ranks.

    Macro F1 is scikit-learn's: the mean of 2 · correct predictions / (predictions + labels) over the classes
    that have a label or a prediction.
    """
    from toolkit.models.common.classification_head import ClassificationHead

    counts = torch.zeros(3, classes, dtype=torch.int64, device=device)
    for model in model_parts.models:
        head = model.output
        if isinstance(head, ClassificationHead) and head.counts is not None:
            counts += head.counts
            head.counts = None
    dist.all_reduce(counts)  # tp and cp shard the sequence, so each token is on one rank
    return _class_scores(counts.cpu())


def _class_scores(counts: Tensor) -> dict[str, float]:
    correct, predicted, labeled = counts.double()
    seen = predicted + labeled > 0
    f1 = 2 * correct[seen] / (predicted + labeled)[seen]
    return {
        "validation_accuracy": (correct.sum() / labeled.sum().clamp(min=1)).item(),
        "validation_f1": f1.sum().item() / max(1, int(seen.sum())),
    }
