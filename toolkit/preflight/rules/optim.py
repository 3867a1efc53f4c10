"""Rules about the optimizer, its schedule, and how long a run is."""

from __future__ import annotations

from fnmatch import fnmatchcase

from toolkit.config.precedence import is_set, replaced
from toolkit.errors import Problem, closest, first_few
from toolkit.models.common.args import parameter_names
from toolkit.optim.lr_scheduler import cut_to_fit
from toolkit.preflight.planned_run import PlannedRun, note, rule

_ENDLESS = ("constant", "step")
_EARLY = "optimizer.early_step_in_backward"
_SHOWN = 8


def _both_set(run: PlannedRun, key: str, other: str, what: str) -> list[Problem]:
    """``key`` takes the place of ``other`` where it was set nearer, as epochs do of a preset's steps."""
    config = run.config
    if not (is_set(config, key) and is_set(config, other)) or other in replaced(config):
        return []
    value, where = config.value(other), config.origin(other)
    return [run.problem(key, f"{other} = {value} ({where}) gives {what}, too", "leave one of the two out")]


@rule()
def one_length(run: PlannedRun) -> list[Problem]:
    """A run is as long as its steps or as its epochs."""
    return _both_set(run, "training.epochs", "training.steps", "the length of the run")


@rule()
def one_warmup(run: PlannedRun) -> list[Problem]:
    """A warm-up is given in steps or as a part of the schedule."""
    return _both_set(run, "lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps", "the warm-up")


@rule()
def total_steps_act(run: PlannedRun) -> list[Problem]:
    """A schedule without an end has a length for its warm-up alone."""
    options, key = run.config.lr_scheduler, "lr_scheduler.total_steps"
    if options.total_steps is None or options.decay_type not in _ENDLESS or options.warmup_ratio is not None:
        return []
    fix = "leave it out, or set warmup_ratio, or a shape that decays to an end: linear, sqrt or cosine"
    return [run.problem(key, f'does nothing with decay_type = "{options.decay_type}"', fix)]


@rule()
def learning_rate_above_zero(run: PlannedRun) -> list[Problem]:
    """Past the end of its schedule the rate stays where it ended; at zero nothing is learnt."""
    schedule, training = run.config.lr_scheduler, run.config.training
    if schedule.total_steps is None or schedule.decay_type in _ENDLESS or schedule.min_lr_factor > 0:
        return []
    if training.epochs:
        length = f"the run is {training.epochs} epochs long, however many steps these are"
        fix = "leave total_steps out: the schedule is then as long as the run"
    elif schedule.total_steps < training.steps:
        length, fix = f"training.steps is {training.steps}", f"set total_steps to at least {training.steps}"
    else:
        return []
    return [
        run.problem(
            "lr_scheduler.total_steps",
            f"the schedule ends at a learning rate of 0, but {length}",
            f"{fix}, or set lr_scheduler.min_lr_factor above 0",
        )
    ]


@rule()
def no_decay_matches(run: PlannedRun) -> list[Problem]:
    """A pattern that matches no parameter would leave decayed what its author meant to spare."""
    patterns, model = run.config.optimizer.no_decay, run.model
    if model is None:
        return []
    names = parameter_names(model)
    # Blocks are alike: the first stands for all.
    kinds = [name for name in names if not name.startswith("layers.") or name.startswith("layers.0.")]
    return [
        run.problem(
            "optimizer.no_decay",
            f'"{pattern}" matches no parameter',
            _similar(pattern, kinds),
        )
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def _similar(pattern: str, kinds: list[str]) -> str:
    """The names that hold the pattern's words, else the nearest one, else some."""
    words = pattern.replace("*", " ").split()
    near = [name for name in kinds if words and all(word.strip(".").lower() in name for word in words)]
    bare = closest(pattern.replace("*", ""), kinds)
    shown = near or ([bare] if bare else kinds)
    return f"name parameters such as {first_few(shown, _SHOWN)}; * stands for any characters"


@rule()
def early_step_alone(run: PlannedRun) -> list[Problem]:
    """A parameter that is updated in backward has neither all micro-batches nor the norm of all gradients."""
    training = run.config.training
    if not run.config.optimizer.early_step_in_backward:
        return []
    without = f"or leave {_EARLY} out"
    problems = []
    if training.max_norm != float("inf"):
        rule = f"{_EARLY} updates each parameter before the norm of all gradients is known: it cannot clip"
        problems.append(run.problem("training.max_norm", rule, f"set training.max_norm = inf, {without}"))
    if run.batch and run.mesh and run.batch.accumulation > 1:
        total, local, count, dp = run.batch.total, run.batch.local, run.batch.accumulation, run.mesh.dp
        rule = (
            f"{total} samples = {dp} data-parallel × {local} local × {count} accumulated, but {_EARLY} "
            "updates in every backward: a step is one micro-batch"
        )
        fix = f"set it to {local * dp}, raise training.local_batch_size to {local * count}, {without}"
        problems.append(run.problem("training.global_batch_size", rule, fix))
    if training.enable_cpu_offload:
        rule = (
            f"gradients of an offloaded model are in CPU memory anyway; {_EARLY} would free none on the "
            "device, and would make backward wait for each update"
        )
        problems.append(run.problem("training.enable_cpu_offload", rule, "leave one of the two out"))
    return problems


@note
def optim_notes(run: PlannedRun) -> list[str]:
    """Tell what is allowed but may surprise."""
    schedule, training, optimizer = run.config.lr_scheduler, run.config.training, run.config.optimizer
    said = []
    if training.epochs and is_set(run.config, "training.steps"):
        where = run.config.origin("training.steps")
        said.append(f"training.epochs {training.epochs} replaces training.steps {training.steps} ({where})")
    steps = schedule.total_steps or (None if training.epochs else training.steps)
    if steps:  # those of an epoch are known once the corpus is open
        said += cut_to_fit(schedule, steps)
    if optimizer.no_decay and optimizer.weight_decay == 0:
        said.append("optimizer.no_decay does nothing: weight_decay is 0")
    if optimizer.early_step_in_backward and run.mesh and run.mesh.dp_replicate > 1:
        said.append(
            f"{_EARLY} saves no memory with {run.mesh.dp_replicate} replicas: torch keeps the gradients that "
            "it has reduced over them until backward ends"
        )
    return said
