"""The loss of training, without gradients, over a held-out corpus, and what a classifier gets right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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
from toolkit.parallel.model_parts import ModelParts
from toolkit.parallel.objective import MicroBatch, Objective, divisor
from toolkit.train_step import TrainState


class Validation:
    """The validations of a run: the loss on its held-out corpus and, before the first step and after the
    last, on the base corpus, if there is one."""

    def __init__(
        self,
        config: Config,
        data: RunData,
        model_parts: ModelParts,
        *,
        device: torch.device,
        dp_rank: int,
        dp_size: int,
    ):
        self._options, self._model_parts, self._device = config.validation, model_parts, device
        # A model that was trained before: there is something to compare the end with.
        initial = config.checkpoint.initial_load_path
        self._pretrained = pretrained_folder(config) is not None or initial is not None
        loader = validation_loader(config, data, dp_rank=dp_rank, dp_size=dp_size)
        assert loader is not None, "validation is on"
        self.loader = loader
        self._base = validation_loader(config, data, dp_rank=dp_rank, dp_size=dp_size, table=BASE_CORPUS)

    def due(self, step: int, *, last: bool = False) -> bool:
        """Say if the model is validated after ``step``, or before the first, which is 0."""
        return last or (step % self._options.freq == 0 if step else self._pretrained)

    def run(self, state: TrainState, *, last: bool, stop: Callable[[], bool]) -> dict[str, float] | None:
        """Validate after the step of ``state``, which keeps the best loss and the first.

        Returns the values to report, or None where ``stop`` was true on some rank before the end.
        """
        steps, model_parts = self._options.steps, self._model_parts
        options = dict[str, Any](device=self._device, limit=None if steps == -1 else steps, stop=stop)
        values: dict[str, float] = {}
        found = validate(model_parts, self.loader, **options)
        if found and self._base and (last or state.step == 0):
            values = base_corpus_loss(model_parts, self._base, **options)
        if classifier := model_parts.models[0].args.classifier:
            classes = len(classifier.labels)
            values |= take_class_scores(model_parts, classes=classes, device=self._device)
        if found is None:
            return None
        loss, best = found["loss"], state.best_validation
        if state.step and math.isfinite(loss) and (best is None or not best <= loss):
            state.best_validation, state.best_step = loss, state.step
        values = {f"validation_{name}": value for name, value in found.items()} | values
        if state.step == 0:
            state.before = {key: values[name] for name, key in self._compared.items() if name in values}
        return values

    def begun(self, state: TrainState) -> dict[str, float]:
        """Losses from before the first step of the run of ``state``, on these samples."""
        return {name: state.before[key] for name, key in self._compared.items() if key in state.before}

    @property
    def _compared(self) -> dict[str, str]:
        """Losses that are told before and after, and the samples that each is of."""
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
    """The mean "loss" a token (nats), or the objective's with what else it reports, over all ranks'
    micro-batches, at most ``limit`` of them on each rank; None where ``stop`` was true on some rank before
    the end. ``objective`` takes the place of the run's own.

    Every rank must bring equally many micro-batches: sharded parameters are gathered in each.
    """
    for model in model_parts.models:
        model.eval()
    own = model_parts.objective
    model_parts.objective = objective = objective or own
    names = ("loss", *objective.names)
    sums = torch.zeros(1 + len(names), dtype=torch.float64, device=device)
    stops = torch.zeros((), device=device)
    for batch in islice(batches, limit):
        stops.fill_(stop())
        dist.all_reduce(stops)
        if stops:
            break
        batch = model_parts.prepare(batch, device)
        sums[1:] += model_parts.loss(batch)
        sums[0] += objective.count([batch]) * model_parts.is_loss_rank
    dist.all_reduce(sums)
    model_parts.end_evaluation()
    model_parts.objective = own
    for model in model_parts.models:
        model.train()
    means = (sums[1:] / divisor(sums[0])).tolist()
    return None if stops else dict(zip(names, means, strict=True))


class _NextToken(Objective):
    """The loss of the next token, also of a model whose own objective takes the losses of tokens apart."""

    def __call__(self, output: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return super().__call__(output.sum(), batch)


def base_corpus_loss(
    model_parts: ModelParts, batches: Iterable[MicroBatch], **options: Any
) -> dict[str, float]:
    """Loss (nats a token) and perplexity of the model, adapter and all, on text that is not what it learns;
    nothing where it was stopped before the end. ``options`` are those of :func:`validate`."""
    found = validate(model_parts, batches, objective=_NextToken(), **options)
    if found is None:
        return {}
    loss = found["loss"]
    return {"base_corpus_loss": loss, "base_corpus_perplexity": perplexity(loss)}


def take_class_scores(model_parts: ModelParts, *, classes: int, device: torch.device) -> dict[str, float]:
    """Accuracy and macro F1 of the answers of a classifier since the last call, over all ranks.

    Macro F1 is that of scikit-learn: the mean over the classes that some text has or some answer was, each 2
    right answers / (answers + texts).
    """
    from toolkit.models.common.classification_head import ClassificationHead

    counts = torch.zeros(3, classes, dtype=torch.int64, device=device)
    for model in model_parts.models:
        head = model.output
        if isinstance(head, ClassificationHead) and head.counts is not None:
            counts += head.counts
            head.counts = None
    dist.all_reduce(counts)  # each token is on one rank: of tp and cp each has a piece of the sequence
    return _class_scores(counts.cpu())


def _class_scores(counts: Tensor) -> dict[str, float]:
    right, answers, texts = counts.double()
    seen = answers + texts > 0
    f1 = 2 * right[seen] / (answers + texts)[seen]
    return {
        "validation_accuracy": (right.sum() / texts.sum().clamp(min=1)).item(),
        "validation_f1": f1.sum().item() / max(1, int(seen.sum())),
    }
