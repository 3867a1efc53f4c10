"""Rules for pipelines: stages, micro-batches, gradients and custom schedules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from toolkit.config.local_paths import expand_user
from toolkit.errors import Problem, did_you_mean, divisors, first_few, join_or
from toolkit.models.parameters import table
from toolkit.parallel.dims import reshard_after_forward, strategy
from toolkit.parallel.pipeline_schedules import (
    BASES,
    SCHEDULES,
    Schedule,
    bubble,
    is_valid_split,
    module_names,
)
from toolkit.preflight.planned_run import PlannedRun, note, rule, torch_before

_DEGREE = "parallelism.pipeline_parallel_degree"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_ENDS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
"""Keys that give the cost of embedding and head in layers."""
_SHOWN = 4
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_SIZE = "parallelism.pipeline_parallel_microbatch_size"
_FILE = "parallelism.pipeline_parallel_schedule_csv"
_PARTS = "parallelism.module_fqns_per_model_part"
_RESHARD = "parallelism.fsdp_reshard_after_forward"
_STRATEGY = "parallelism.sharding_strategy"
_CHECKPOINT = "activation_checkpoint.selective_ac_option"
_EARLY = "optimizer.early_step_in_backward"
_LARGE_BUBBLE = 0.2


# The stages


@rule()
def schedule_takes_stages(run: PlannedRun) -> list[Problem]:
    """Check that the number of stages suits the schedule."""
    if run.stages is None or run.model is None:
        return []
    count, name = len(run.stages.modules), run.config.parallelism.pipeline_parallel_schedule
    if run.schedule.supports_stages(count, run.pp):
        return []
    by_hand = run.config.parallelism.module_fqns_per_model_part is not None
    count_text = (
        f"names {count} stages" if by_hand else f"makes {count} stages of {run.model.n_layers} layers"
    )
    needs = _needs(run.schedule, run.pp)
    fix = f"name {needs}" if by_hand else f"remove it for {run.schedule.stages * run.pp} stages"
    others = [other for other, schedule in SCHEDULES.items() if schedule.supports_stages(count, run.pp)]
    if others:
        fix += f", or set {_SCHEDULE} to {join_or(others)}"
    rule = f"{count_text}, but {name} on {run.pp} ranks needs {needs}"
    return [run.problem(_PARTS if by_hand else _PER_STAGE, rule, fix)]


def _needs(schedule: Schedule, pp: int) -> str:
    if schedule.more:
        return f"{schedule.stages * pp} or a larger multiple of {pp}"
    return f"{schedule.stages * pp}, {'two' if schedule.stages == 2 else 'one'} per rank"


@rule()
def stages_not_empty(run: PlannedRun) -> list[Problem]:
    """Check that no stage is empty; embedding and head count as a configured number of layers."""
    options = run.config.parallelism
    if run.stages is None or run.model is None or options.module_fqns_per_model_part is not None:
        return []
    count, n_layers = len(run.stages.modules), run.model.n_layers
    if is_valid_split(run.stages.modules, n_layers) or not run.schedule.supports_stages(count, run.pp):
        return []
    key = _DEGREE if options.pipeline_parallel_layers_per_stage is None else _PER_STAGE
    first, last = (getattr(options, name) for name in _ENDS)
    empty = [str(stage) for stage, part in enumerate(run.stages.modules) if not part]
    rule = f"{count} stages of {n_layers} layers leave stage {first_few(empty, _SHOWN)} empty"
    if not empty:
        rule = f"{count} stages of {n_layers} layers leave no room for the embedding and the head"
    if first or last:
        rule += f", which count as {first} and {last} layers"
    most = (n_layers + first + last) // max(1, first, last) // run.schedule.stages
    fix = f"set it to at most {max(1, most)}" if key == _DEGREE else "raise it"
    if max(first, last) > 1:
        fix += f", or lower parallelism.{_ENDS[first < last]}"
    return [run.problem(key, rule, fix)]


@rule()
def stage_modules_match_model(run: PlannedRun) -> list[Problem]:
    """Check that manually named stages contain each module once, in forward order."""
    parts = run.config.parallelism.module_fqns_per_model_part
    if parts is None or run.model is None:
        return []
    order = {name: place for place, name in enumerate(module_names(run.model.n_layers))}
    given = [name for part in parts for name in part]
    known, times = [name for name in given if name in order], Counter(given)
    wrong = {
        "the model has no": [name for name in given if name not in order],
        "in no stage:": [name for name in order if name not in times],
        "named more than once:": [name for name in order if times[name] > 1],
        "empty stages:": [str(stage) for stage, part in enumerate(parts) if not part],
        "out of order:": [after for before, after in pairwise(known) if order[after] < order[before]],
        "split over two stages:": ["norm and output"]
        if any(("norm" in part) != ("output" in part) for part in parts)
        else [],
    }
    if not any(wrong.values()):
        return []
    rule = "; ".join(f"{what} {first_few(names, _SHOWN)}" for what, names in wrong.items() if names)
    modules = f"tok_embeddings, layers.0 to layers.{run.model.n_layers - 1}, norm and output"
    fix = f"name each of {modules} once, in this order, the last two in one stage"
    if unknown := wrong["the model has no"]:
        fix = f"{did_you_mean(unknown[0], order, 'use names of its modules')} ({fix})"
    return [run.problem(_PARTS, rule, fix)]


# The schedule


@rule()
def rows_fill_micro_batches(run: PlannedRun) -> list[Problem]:
    """Check that a rank's samples divide into whole micro-batches."""
    size = run.config.parallelism.pipeline_parallel_microbatch_size
    if run.pp == 1 or run.rows is None or run.rows % size == 0:
        return []
    rule = f"must divide the samples per rank and step, which are {run.rows}"
    return [run.problem(_SIZE, rule, f"set it to {join_or(divisors(run.rows)[-4:])}")]


@rule()
def schedule_takes_micro_batches(run: PlannedRun) -> list[Problem]:
    """Check that the schedule can run this many micro-batches."""
    options, count, stages = run.config.parallelism, run.micro_batches, run.stages
    if options.pipeline_parallel_schedule_csv or count is None or stages is None:
        return []
    total = len(stages.modules)
    if not run.schedule.supports_stages(total, run.pp):
        return []
    if run.schedule.supports_micro_batches(count, stages=total, pp=run.pp):
        return []
    rule = f"each rank has {count} micro-batches per step ({run.rows} samples), but the schedule "
    if run.schedule.needs == "stages":
        rule, enough = f"{rule}needs at least one per stage, which are {total}", [total]
    else:
        rounds = count // run.pp
        rule += f"runs them in {rounds} equal rounds of about one per rank"
        enough = [rounds * run.pp, (rounds + 1) * run.pp]
    freer = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}
    other = freer.get(options.pipeline_parallel_schedule, "LoopedBFS")
    fix = f'set {_batch_for(run, enough)}, or {_SCHEDULE} to "{other}"'
    return [
        run.problem(_SCHEDULE, rule, fix, "training.global_batch_size", "training.local_batch_size", _DEGREE)
    ]


def _batch_for(run: PlannedRun, counts: Sequence[int]) -> str:
    """Return the batch size setting that gives one of ``counts`` micro-batches per step."""
    size = run.config.parallelism.pipeline_parallel_microbatch_size
    if run.config.training.global_batch_size == -1:
        return f"training.local_batch_size to {join_or(size * count for count in counts)}"
    assert run.mesh is not None
    return f"training.global_batch_size to {join_or(run.mesh.dp * size * count for count in counts)}"


@rule()
def split_backward_keeps_parameters(run: PlannedRun) -> list[Problem]:
    """Check that parameters stay unsharded for a split backward: otherwise, torch drops their gradients."""
    options = run.config.parallelism
    if run.pp == 1 or reshard_after_forward(options) == "never" or not _splits_backward(run):
        return []
    name, file = strategy(options), options.pipeline_parallel_schedule_csv
    rule = (
        f"{_which(run)} computes weight gradients separately from input gradients, which torch supports only "
        "for parameters that stay unsharded; other gradients would be wrong"
    )
    key = _RESHARD if name is None else _STRATEGY
    fix = 'set it to "never"' if name is None else f'remove it for {_RESHARD} = "never"'
    if name == "NO_SHARD":
        fix += " and parallelism.data_parallel_replicate_degree as replicas"
    return [run.problem(key, rule, f"{fix}, or {_whole(file)}")]


@rule()
def split_backward_computes_again(run: PlannedRun) -> list[Problem]:
    """Check that no block needs its saved tensors twice.

    Selective checkpointing returns each saved tensor once, but a split backward needs it twice. In compiled
    blocks, both halves are part of one graph.
    """
    if run.pp == 1 or not _computes_operations_again(run) or not _splits_backward(run):
        return []
    rule = (
        f"{_which(run)} computes weight gradients separately from input gradients, and torch returns tensors "
        "saved by op only once"
    )
    whole = _whole(run.config.parallelism.pipeline_parallel_schedule_csv)
    compiled = "" if torch_before((2, 13)) else "set compile.enable = true, "
    fix = f'set {_CHECKPOINT} = "1", {compiled}or {whole}'
    return [run.problem(_CHECKPOINT, rule, fix, "activation_checkpoint.mode", _FILE, _SCHEDULE)]


@rule()
def split_backward_of_compiled_code(run: PlannedRun) -> list[Problem]:
    """Check that torch can split the backward of compiled code (an autograd.Function), which needs 2.13."""
    version = torch_before((2, 13))
    if version is None or run.pp == 1 or not run.config.compile.enable or not _splits_backward(run):
        return []
    rule = (
        f"{_which(run)} computes weight gradients separately from input gradients, which torch supports for "
        f"compiled code from 2.13 on; this is {version}"
    )
    whole = _whole(run.config.parallelism.pipeline_parallel_schedule_csv)
    return [run.problem("compile.enable", rule, f"set it to false, {whole}, or install torch 2.13")]


def _computes_operations_again(run: PlannedRun) -> bool:
    """Return whether operators of uncompiled blocks are selectively recomputed."""
    return run.config.activation_checkpoint.by_operator and not run.config.compile.blocks


def _which(run: PlannedRun) -> str:
    options = run.config.parallelism
    file = options.pipeline_parallel_schedule_csv
    return f"the schedule of {file}" if file else options.pipeline_parallel_schedule


def _whole(file: str | None) -> str:
    return "write B instead of I and W there" if file else f'set {_SCHEDULE} to "Interleaved1F1B"'


def _splits_backward(run: PlannedRun) -> bool:
    if run.config.parallelism.pipeline_parallel_schedule_csv:
        return bool(re.search(r"\d[IW]\d", _schedule_file(run)[0]))
    return run.schedule.split_backward


@rule()
def v_shape_runs_here(run: PlannedRun) -> list[Problem]:
    """Check that a V-shaped schedule does not send to its own rank through gloo, which needs torch 2.13."""
    if run.pp == 1 or not run.schedule.v_shaped or run.hardware.device != "cpu":
        return []
    version = torch_before((2, 13))
    if version is None:
        return []
    rule = f"needs torch 2.13 on a CPU, and this is {version}: gloo cannot send to its own rank"
    fix = 'set it to "InterleavedZeroBubble", which is not V-shaped, or install torch 2.13'
    return [run.problem(_SCHEDULE, rule, fix)]


@rule()
def early_step_without_pipeline(run: PlannedRun) -> list[Problem]:
    """Check that updates in backward are off, because a pipeline must first sum gradients over all
    micro-batches."""
    if run.pp == 1 or not run.config.optimizer.early_step_in_backward:
        return []
    rule = "a pipeline completes its gradients only after all micro-batches: none can be freed earlier"
    return [run.problem(_EARLY, rule, "remove it")]


@rule()
def base_has_a_file(run: PlannedRun) -> list[Problem]:
    """Check that torch's base classes of schedules, which define no order, are used with a schedule file."""
    options = run.config.parallelism
    named = options.pipeline_parallel_schedule in BASES
    if run.pp == 1 or not named or options.pipeline_parallel_schedule_csv:
        return []
    whole = "1F1B" if run.schedule.stages == 1 else "Interleaved1F1B"
    rule = "is torch's base class for schedules and needs a schedule file, which is not set"
    return [run.problem(_SCHEDULE, rule, f'set {_FILE}, or set it to "{whole}"')]


def _schedule_file(run: PlannedRun) -> tuple[str, str]:
    """Return the text of the user's schedule and, if it cannot be read, the reason."""
    path = expand_user(run.config.parallelism.pipeline_parallel_schedule_csv or "")
    if not path.is_file():
        return "", "there is no such file"
    try:
        return path.read_text("utf-8"), ""
    except (OSError, UnicodeDecodeError) as error:
        return "", f"it cannot be read: {getattr(error, 'strerror', None) or error}"


@rule()
def schedule_file_is_there(run: PlannedRun) -> list[Problem]:
    """Check that a schedule file can be read and has one line per rank. torch validates the rest when it
    loads the file."""
    if run.pp == 1 or not run.config.parallelism.pipeline_parallel_schedule_csv:
        return []
    text, unreadable = _schedule_file(run)
    lines = len(text.splitlines())
    if not unreadable and lines == run.pp:
        return []
    rule = unreadable or f"has lines for {lines} ranks, but the pipeline has {run.pp}"
    fix = "use a CSV file with one line of actions per pipeline rank, such as 0F0,0F1,0B0,0B1"
    return [run.problem(_FILE, rule, fix)]


@note
def pipeline_notes(run: PlannedRun) -> list[str]:
    """Note idle time and redundant computation."""
    options, messages = run.config.parallelism, []
    file = options.pipeline_parallel_schedule_csv
    if run.pp == 1:
        return []
    if run.config.compile.blocks and _splits_backward(run):
        messages.append(
            f"a compiled backward cannot be split: {file or options.pipeline_parallel_schedule} runs each "
            "block's backward twice, for inputs and for weights; "
            f"to compute less, set compile.enable = false, or {_whole(file)}"
        )
    mode = run.config.activation_checkpoint.mode
    if mode in ("full", "selective") and not run.config.compile.blocks and _splits_backward(run):
        messages.append(
            f'activation_checkpoint.mode = "{mode}": {file or options.pipeline_parallel_schedule} computes '
            "weight gradients separately, for which torch recomputes a checkpointed block once per weight: "
            f"up to {_weights_of_block(run) + 1} times per micro-batch in all but the first stage; "
            f"to compute less, set it to none, or {_whole(file)}"
        )
    return messages + _waiting(run)


def _weights_of_block(run: PlannedRun) -> int:
    assert run.model is not None
    return max(map(len, table(run.model).blocks))


def _waiting(run: PlannedRun) -> list[str]:
    """Note the fraction of step time that ranks idle, and how many micro-batches would reduce it."""
    options, count, stages = run.config.parallelism, run.micro_batches, run.stages
    if options.pipeline_parallel_schedule_csv or count is None or stages is None:
        return []
    name, total = options.pipeline_parallel_schedule, len(stages.modules)

    def share(micro_batches: int) -> float:
        return bubble(name, micro_batches, stages=total, pp=run.pp)

    if share(count) <= _LARGE_BUBBLE:
        return []
    enough = next(
        n
        for n in range(count, 100 * total)
        if share(n) <= _LARGE_BUBBLE and run.schedule.supports_micro_batches(n, stages=total, pp=run.pp)
    )
    fix = f"set {_batch_for(run, [enough])}"
    if options.pipeline_parallel_microbatch_size > 1:
        fix += f", or {_SIZE} lower"
    return [
        f"ranks idle for about {share(count):.0%} of a step: {count} micro-batches per step on "
        f"{run.pp} ranks with {name}; with {enough} it is {share(enough):.0%}: {fix}"
    ]
