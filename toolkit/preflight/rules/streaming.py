"""Rules about text that is tokenised while it is trained on."""

from __future__ import annotations

from toolkit.config.schema import added
from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, note, rule


@rule()
def streams_one_text(run: PlannedRun) -> list[Problem]:
    """Rows are packed from the text of one corpus, whose length nobody knows."""
    config = run.config
    if not config.data.streaming:
        return []
    wrong = {
        "data.mixture": (bool(config.data.mixture), "its parts are drawn by their lengths"),
        "data.packing": (not config.data.packing, "its rows are filled with documents end to end"),
        "training.epochs": (bool(config.training.epochs), "its samples are not counted; give training.steps"),
        "lr_scheduler.decay_type": (
            config.lr_scheduler.decay_type == "step" and config.lr_scheduler.step_size is None,
            "an epoch, after which the rate falls, is not counted; give lr_scheduler.step_size",
        ),
        "training.dataset": (
            config.training.dataset_path is None and config.training.dataset in added("training.dataset"),
            "its rows come from a function, not from files",
        ),
        "finetune.classification.num_labels": (
            bool(config.finetune.classification.num_labels), "texts with a class do not stream",
        ),
    }  # fmt: skip
    key = "training.format" if config.training.format is not None else "data.format"
    wrong[key] = (config.value(key) != "text", "conversations do not stream")
    return [
        run.problem(key, f"data.streaming is on: {why}", "change it, or set data.streaming = false")
        for key, (is_wrong, why) in wrong.items()
        if is_wrong
    ]


@note
def streaming_notes(run: PlannedRun) -> list[str]:
    """Tell what streaming costs where no process is given to it, and options that it does not read."""
    if not run.config.data.streaming:
        return []
    options = run.config.training.dataloader
    unread = [
        name for name in ("persistent_workers", "prefetch_factor", "pin_memory") if getattr(options, name)
    ]
    said = [f"training.dataloader.{name} does nothing with data.streaming" for name in unread]
    if not options.num_workers:
        said.append(
            "data.streaming without workers: the ranks wait for each piece of text to be tokenised; "
            "training.dataloader.num_workers = 1 or more does it beside them"
        )
    return said
