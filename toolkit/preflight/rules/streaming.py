"""Rules for text that is tokenized during training."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.schema import registry
from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, note, rule


@rule()
def streams_one_text(run: PlannedRun) -> Iterator[Problem]:
    """Check that the run's options support streaming, which reads a single text of unknown length."""
    config = run.config
    if not config.data.streaming:
        return
    wrong = {
        "data.streaming": (bool(config.data.mixture), "a mixture needs the lengths of its corpora"),
        "data.packing": (not config.data.packing, "a stream packs documents end to end"),
        "training.epochs": (bool(config.training.epochs), "its samples are not counted; set training.steps"),
        "lr_scheduler.decay_type": (
            config.lr_scheduler.decay_type == "step" and config.lr_scheduler.step_size is None,
            "the length of an epoch is not known; set lr_scheduler.step_size",
        ),
        "training.dataset": (
            config.training.dataset_path is None and config.training.dataset in registry("training.dataset"),
            "its rows come from a function, not from files",
        ),
        "finetune.classification.num_labels": (
            bool(config.finetune.classification.num_labels), "labeled texts cannot be streamed",
        ),
    }  # fmt: skip
    key = "training.format" if config.training.format is not None else "data.format"
    wrong[key] = (config.value(key) != "text", "conversations cannot be streamed")
    for key, (is_wrong, why) in wrong.items():
        if is_wrong:
            yield run.problem(key, f"data.streaming is on: {why}", "change it, or set data.streaming = false")


@note
def streaming_notes(run: PlannedRun) -> Iterator[str]:
    """Note the cost of streaming without workers, and the options that streaming ignores."""
    if not run.config.data.streaming:
        return
    options = run.config.training.dataloader
    for name in ("persistent_workers", "prefetch_factor", "pin_memory"):
        if getattr(options, name):
            yield f"training.dataloader.{name} has no effect with data.streaming"
    if not options.num_workers:
        yield (
            "data.streaming without workers: ranks wait while text is tokenized; set "
            "training.dataloader.num_workers = 1 or more to tokenize in the background"
        )
