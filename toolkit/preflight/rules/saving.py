"""Rules for saving checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, rule


@rule()
def checkpoints_can_be_saved(run: PlannedRun) -> Iterator[Problem]:
    """Check that checkpoints to keep are saved, in a way that the device supports."""
    options = run.config.checkpoint
    if options.keep_every_n and options.keep_every_n % options.interval:
        rule = (
            f"must be a multiple of checkpoint.interval, which is {options.interval}: no other step is saved"
        )
        near = options.interval * -(-options.keep_every_n // options.interval)
        yield run.problem("checkpoint.keep_every_n", rule, f"the nearest is {near}")
    yield from _best(run)
    if options.async_mode == "async_with_pinned_mem" and run.hardware.device == "cpu":
        rule = "pinned memory is for copies from a GPU, and this device is a CPU"
        yield run.problem("checkpoint.async_mode", rule, 'set it to "async"')
    if options.create_seed_checkpoint and run.start.steps:
        rule = f"is for a new run, but {run.checkpoints} already has step {max(run.start.steps)}"
        fix = "remove it to resume from there, or use another job.dump_folder"
        yield run.problem("checkpoint.create_seed_checkpoint", rule, fix)


def _best(run: PlannedRun) -> Iterator[Problem]:
    """Check that the metric of the best checkpoint is measured at steps that are saved."""
    options, validation, evaluation = run.config.checkpoint, run.config.validation, run.config.evaluation
    key, metric = "checkpoint.keep_best_metric", options.keep_best_metric
    by_task = metric != "validation_loss"
    if by_task and not (metric.startswith("eval/") and metric.count("/") >= 2):
        yield run.problem(key, "is not a metric of a checkpoint", "use validation_loss, or eval/TASK/METRIC")
    elif not options.keep_best:
        return
    elif by_task and not evaluation.tasks:
        yield run.problem(key, "is a score on a task, and there is none", "set evaluation.tasks")
    elif not by_task and not validation.enable:
        rule = "the best checkpoint has the lowest validation loss, and there is no validation"
        yield run.problem("checkpoint.keep_best", rule, "set validation.enable, or remove it")
    elif (freq := (evaluation if by_task else validation).freq) % options.interval:
        table, verb = ("evaluation", "evaluates") if by_task else ("validation", "validates")
        rule = f"saves every {options.interval} steps but {verb} every {freq}: the best step may not be saved"
        fix = f"set {table}.freq to a multiple of {options.interval}"
        yield run.problem("checkpoint.keep_best", rule, fix)
