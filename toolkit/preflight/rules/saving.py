"""Rules for saving checkpoints."""

from __future__ import annotations

from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, rule


@rule()
def checkpoints_can_be_saved(run: PlannedRun) -> list[Problem]:
    """Check that checkpoints to keep are saved, in a way that the device supports."""
    options, problems = run.config.checkpoint, []
    if options.keep_every_n and options.keep_every_n % options.interval:
        rule = (
            f"must be a multiple of checkpoint.interval, which is {options.interval}: no other step is saved"
        )
        near = options.interval * -(-options.keep_every_n // options.interval)
        problems.append(run.problem("checkpoint.keep_every_n", rule, f"the nearest is {near}"))
    validation = run.config.validation
    if options.keep_best and not validation.enable:
        rule = "the best checkpoint has the lowest validation loss, and there is no validation"
        problems.append(run.problem("checkpoint.keep_best", rule, "set validation.enable, or remove it"))
    elif options.keep_best and validation.freq % options.interval:
        rule = f"saves every {options.interval} steps but validates every {validation.freq}: the best step "
        rule += "may not be saved"
        fix = f"set validation.freq to a multiple of {options.interval}"
        problems.append(run.problem("checkpoint.keep_best", rule, fix))
    if options.async_mode == "async_with_pinned_mem" and run.hardware.device == "cpu":
        rule = "pinned memory is for copies from a GPU, and this device is a CPU"
        problems.append(run.problem("checkpoint.async_mode", rule, 'set it to "async"'))
    if options.create_seed_checkpoint and run.start.steps:
        rule = f"is for a new run, but {run.checkpoints} already has step {max(run.start.steps)}"
        fix = "remove it to resume from there, or use another job.dump_folder"
        problems.append(run.problem("checkpoint.create_seed_checkpoint", rule, fix))
    return problems
