"""Rules about a pipeline: its stages, micro-batches and gradients, and a schedule of one's own."""

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
"""Layers that the embedding and the head count as."""
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
    """A schedule runs one stage on a rank, or two, or any number of them."""
    if run.stages is None or run.model is None:
        return []
    count, name = len(run.stages.modules), run.config.parallelism.pipeline_parallel_schedule
    if run.schedule.supports_stages(count, run.pp):
        return []
    by_hand = run.config.parallelism.module_fqns_per_model_part is not None
    said = f"names {count} stages" if by_hand else f"makes {count} stages of {run.model.n_layers} layers"
    needs = _needs(run.schedule, run.pp)
    fix = f"name {needs}" if by_hand else f"remove it for {run.schedule.stages * run.pp} stages"
    others = [other for other, schedule in SCHEDULES.items() if schedule.supports_stages(count, run.pp)]
    if others:
        fix += f", or set {_SCHEDULE} to {join_or(others)}"
    rule = f"{said}, but {name} on {run.pp} ranks takes {needs}"
    return [run.problem(_PARTS if by_hand else _PER_STAGE, rule, fix)]


def _needs(schedule: Schedule, pp: int) -> str:
    if schedule.more:
        return f"{schedule.stages * pp} or a larger multiple of {pp}"
    return f"{schedule.stages * pp}, {'two' if schedule.stages == 2 else 'one'} a rank"


@rule()
def stages_hold_something(run: PlannedRun) -> list[Problem]:
    """Each stage has a block, the embedding or the head, and neither of these counts for more than its stage
    has room."""
    options = run.config.parallelism
    if run.stages is None or run.model is None or options.module_fqns_per_model_part is not None:
        return []
    count, n_layers = len(run.stages.modules), run.model.n_layers
    if is_valid_split(run.stages.modules, n_layers) or not run.schedule.supports_stages(count, run.pp):
        return []
    key = _DEGREE if options.pipeline_parallel_layers_per_stage is None else _PER_STAGE
    first, last = (getattr(options, name) for name in _ENDS)
    empty = [str(stage) for stage, part in enumerate(run.stages.modules) if not part]
    rule = f"{count} stages of {n_layers} layers leave nothing to stage {first_few(empty, _SHOWN)}"
    if not empty:
        rule = f"{count} stages of {n_layers} layers have no room for ends that count for so many"
    if first or last:
        rule += f", where the embedding counts as {first} and the head as {last}"
    most = (n_layers + first + last) // max(1, first, last) // run.schedule.stages
    fix = f"set it to at most {max(1, most)}" if key == _DEGREE else "raise it"
    if max(first, last) > 1:
        fix += f", or lower parallelism.{_ENDS[first < last]}"
    return [run.problem(key, rule, fix)]


@rule()
def parts_are_a_cut(run: PlannedRun) -> list[Problem]:
    """Stages named by hand hold each module once, in the order of the forward."""
    parts = run.config.parallelism.module_fqns_per_model_part
    if parts is None or run.model is None:
        return []
    order = {name: place for place, name in enumerate(module_names(run.model.n_layers))}
    given = [name for part in parts for name in part]
    known, times = [name for name in given if name in order], Counter(given)
    wrong = {
        "the model has no": [name for name in given if name not in order],
        "no stage holds": [name for name in order if name not in times],
        "named more than once:": [name for name in order if times[name] > 1],
        "nothing is in stage": [str(stage) for stage, part in enumerate(parts) if not part],
        "out of order:": [after for before, after in pairwise(known) if order[after] < order[before]],
        "computed as one, and in two stages:": ["norm and output"]
        if any(("norm" in part) != ("output" in part) for part in parts)
        else [],
    }
    if not any(wrong.values()):
        return []
    rule = "; ".join(f"{what} {first_few(names, _SHOWN)}" for what, names in wrong.items() if names)
    modules = f"tok_embeddings, layers.0 to layers.{run.model.n_layers - 1}, norm and output"
    fix = f"name each of {modules} once, in this order, the last two in one stage"
    if unknown := wrong["the model has no"]:
        fix = f"{did_you_mean(unknown[0], order, 'name what it has')} ({fix})"
    return [run.problem(_PARTS, rule, fix)]


# The schedule


@rule()
def rows_fill_micro_batches(run: PlannedRun) -> list[Problem]:
    """A rank's samples of a step make whole micro-batches."""
    size = run.config.parallelism.pipeline_parallel_microbatch_size
    if run.pp == 1 or run.rows is None or run.rows % size == 0:
        return []
    rule = f"must divide the samples that a rank has in a step, which are {run.rows}"
    return [run.problem(_SIZE, rule, f"set it to {join_or(divisors(run.rows)[-4:])}")]


@rule()
def schedule_takes_micro_batches(run: PlannedRun) -> list[Problem]:
    """Some schedules need a micro-batch for each stage, others equal rounds of them."""
    options, count, stages = run.config.parallelism, run.micro_batches, run.stages
    if options.pipeline_parallel_schedule_csv or count is None or stages is None:
        return []
    total = len(stages.modules)
    if not run.schedule.supports_stages(total, run.pp):
        return []
    if run.schedule.supports_micro_batches(count, stages=total, pp=run.pp):
        return []
    rule = f"a step of a rank is {count} micro-batches ({run.rows} samples), but the schedule "
    if run.schedule.needs == "stages":
        rule, enough = f"{rule}needs at least as many as stages, which are {total}", [total]
    else:
        rounds = count // run.pp
        rule += f"runs them in {rounds} equal rounds of about one a rank"
        enough = [rounds * run.pp, (rounds + 1) * run.pp]
    freer = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}
    other = freer.get(options.pipeline_parallel_schedule, "LoopedBFS")
    return [run.problem(_SCHEDULE, rule, f'set {_batch_for(run, enough)}, or {_SCHEDULE} to "{other}"')]


def _batch_for(run: PlannedRun, counts: Sequence[int]) -> str:
    """The batch sizes that make so many micro-batches a step."""
    size = run.config.parallelism.pipeline_parallel_microbatch_size
    if run.config.training.global_batch_size == -1:
        return f"training.local_batch_size to {join_or(size * count for count in counts)}"
    assert run.mesh is not None
    return f"training.global_batch_size to {join_or(run.mesh.dp * size * count for count in counts)}"


@rule()
def split_backward_keeps_parameters(run: PlannedRun) -> list[Problem]:
    """Half a backward looks for whole parameters: of freed ones it drops the gradients in silence."""
    options = run.config.parallelism
    if run.pp == 1 or reshard_after_forward(options) == "never" or not _splits_backward(run):
        return []
    name, file = strategy(options), options.pipeline_parallel_schedule_csv
    rule = (
        f"{_which(run)} computes gradients of weights apart from those of inputs, which torch does for "
        "parameters that stay gathered; of others the gradients are wrong"
    )
    key = _RESHARD if name is None else _STRATEGY
    fix = 'set it to "never"' if name is None else f'remove it for {_RESHARD} = "never"'
    if name == "NO_SHARD":
        fix += " and parallelism.data_parallel_replicate_degree as replicas"
    return [run.problem(key, rule, f"{fix}, or {_whole(file)}")]


@rule()
def split_backward_computes_again(run: PlannedRun) -> list[Problem]:
    """Selective checkpointing hands out once what it kept; a backward in halves asks twice. The compiler has
    made both part of one graph."""
    if run.pp == 1 or not _computes_operations_again(run) or not _splits_backward(run):
        return []
    rule = (
        f"{_which(run)} computes gradients of weights apart from those of inputs, and torch hands out only "
        "once what op has kept"
    )
    whole = _whole(run.config.parallelism.pipeline_parallel_schedule_csv)
    compiled = "" if torch_before((2, 13)) else "set compile.enable = true, "
    fix = f'set it to "1", {compiled}or {whole}'
    return [run.problem(_CHECKPOINT, rule, fix)]


@rule()
def split_backward_of_compiled_code(run: PlannedRun) -> list[Problem]:
    """Compiled code is an autograd.Function, from which torch before 2.13 cannot go on to weights alone."""
    version = torch_before((2, 13))
    if version is None or run.pp == 1 or not run.config.compile.enable or not _splits_backward(run):
        return []
    rule = (
        f"{_which(run)} computes gradients of weights apart from those of inputs, which torch does for "
        f"compiled code from 2.13 on, this is {version}"
    )
    whole = _whole(run.config.parallelism.pipeline_parallel_schedule_csv)
    return [run.problem("compile.enable", rule, f"set it to false, {whole}, or install torch 2.13")]


def _computes_operations_again(run: PlannedRun) -> bool:
    """Selective checkpointing by operator, of blocks that are not compiled."""
    return run.config.activation_checkpoint.by_operator and not run.config.compile.blocks


def _which(run: PlannedRun) -> str:
    options = run.config.parallelism
    file = options.pipeline_parallel_schedule_csv
    return f"the schedule of {file}" if file else options.pipeline_parallel_schedule


def _whole(file: str | None) -> str:
    return "write B for I and W there" if file else f'set {_SCHEDULE} to "Interleaved1F1B"'


def _splits_backward(run: PlannedRun) -> bool:
    if run.config.parallelism.pipeline_parallel_schedule_csv:
        return bool(re.search(r"\d[IW]\d", _schedule_file(run)[0]))
    return run.schedule.split_backward


@rule()
def v_shape_runs_here(run: PlannedRun) -> list[Problem]:
    """In a V a rank has two stages in a row; before 2.13 torch sends from one to the other by gloo."""
    if run.pp == 1 or not run.schedule.v_shaped or run.hardware.device != "cpu":
        return []
    version = torch_before((2, 13))
    if version is None:
        return []
    rule = f"on a CPU it needs torch 2.13, this is {version}: gloo cannot send to its own rank"
    fix = 'set it to "InterleavedZeroBubble", which has no V, or install torch 2.13'
    return [run.problem(_SCHEDULE, rule, fix)]


@rule()
def early_step_without_pipeline(run: PlannedRun) -> list[Problem]:
    """A pipeline sums the gradients of all its micro-batches before it reduces them."""
    if run.pp == 1 or not run.config.optimizer.early_step_in_backward:
        return []
    rule = "a pipeline has its gradients when all micro-batches are done: none could be freed earlier"
    return [run.problem(_EARLY, rule, "remove it")]


@rule()
def base_has_a_file(run: PlannedRun) -> list[Problem]:
    """torch's bases of schedules have no order of their own."""
    options = run.config.parallelism
    named = options.pipeline_parallel_schedule in BASES
    if run.pp == 1 or not named or options.pipeline_parallel_schedule_csv:
        return []
    whole = "1F1B" if run.schedule.stages == 1 else "Interleaved1F1B"
    rule = "is torch's base of schedules, to be filled by a file, and none is named"
    return [run.problem(_SCHEDULE, rule, f'name the file in {_FILE}, or set it to "{whole}"')]


def _schedule_file(run: PlannedRun) -> tuple[str, str]:
    """The text of the user's schedule, and why it cannot be read."""
    path = expand_user(run.config.parallelism.pipeline_parallel_schedule_csv or "")
    if not path.is_file():
        return "", "there is no such file"
    try:
        return path.read_text("utf-8"), ""
    except (OSError, UnicodeDecodeError) as error:
        return "", f"it cannot be read: {getattr(error, 'strerror', None) or error}"


@rule()
def schedule_file_is_there(run: PlannedRun) -> list[Problem]:
    """A schedule of one's own can be read, and has a line a rank. torch checks the rest when it is loaded."""
    if run.pp == 1 or not run.config.parallelism.pipeline_parallel_schedule_csv:
        return []
    text, unreadable = _schedule_file(run)
    lines = len(text.splitlines())
    if not unreadable and lines == run.pp:
        return []
    rule = unreadable or f"it has lines for {lines} ranks, and the pipeline has {run.pp}"
    fix = "name a CSV file with a line of actions for each rank of the pipeline, such as 0F0,0F1,0B0,0B1"
    return [run.problem(_FILE, rule, fix)]


@note
def pipeline_notes(run: PlannedRun) -> list[str]:
    """Waiting, and what is computed twice."""
    options, said = run.config.parallelism, []
    file = options.pipeline_parallel_schedule_csv
    if run.pp == 1:
        return []
    if run.config.compile.blocks and _splits_backward(run):
        said.append(
            f"a compiled backward has no halves: {file or options.pipeline_parallel_schedule} runs "
            "that of each block twice, for inputs and for weights; "
            f"to compute less, compile.enable = false, or {_whole(file)}"
        )
    mode = run.config.activation_checkpoint.mode
    if mode in ("full", "selective") and not run.config.compile.blocks and _splits_backward(run):
        said.append(
            f'activation_checkpoint.mode = "{mode}": where {file or options.pipeline_parallel_schedule} '
            "computes the gradients of weights apart, torch computes a checkpointed block again for each of "
            f"its weights, in all but the first stage up to {_weights_of_block(run) + 1} times a "
            f"micro-batch; to compute less, set it to none, or {_whole(file)}"
        )
    return said + _waiting(run)


def _weights_of_block(run: PlannedRun) -> int:
    assert run.model is not None
    return max(map(len, table(run.model).blocks))


def _waiting(run: PlannedRun) -> list[str]:
    """How much of a step ranks wait for one another, and how many micro-batches would help."""
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
        f"ranks wait about {share(count):.0%} of a step for one another: {count} micro-batches a step on "
        f"{run.pp} ranks by {name}; with {enough} it is {share(enough):.0%}: {fix}"
    ]
