"""Rules about options that contradict one another, or do nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from toolkit.config.schema import Field
from toolkit.config.types import ActsWith, RefusedValues
from toolkit.config.values import format_toml
from toolkit.errors import Problem, either
from toolkit.preflight.planned_run import PlannedRun, note, rule

_ON_A_GPU = (
    "training.dataloader.pin_memory",
    "validation.dataloader.pin_memory",
    "training.fused_parts",
    "parallelism.fsdp_skip_on_one_rank",
    "activation_checkpoint.offload_prefetch",
)


@rule()
def supported_options(run: PlannedRun) -> list[Problem]:
    """torchtitan's choices that there are not here."""
    return [
        run.problem(field.key, mark.reason, f"set {field.name} = {format_toml(field.default)}, the default")
        for field in run.config.present_fields()
        for mark in field.marks
        if isinstance(mark, RefusedValues) and mark.refuses(run.config.value(field.key))
    ]


def _idle(run: PlannedRun) -> Iterator[tuple[Field, list[ActsWith]]]:
    """The keys that are set and that nothing reads, and what they would act with."""
    for field in run.config.present_fields():
        switches = [mark for mark in field.marks if isinstance(mark, ActsWith)]
        if run.config.value(field.key) == field.default or not switches:
            continue
        if not any(mark.acts(run.config.value(mark.switch)) for mark in switches):
            yield field, switches


def _turned_on(run: PlannedRun, mark: ActsWith) -> str:
    if isinstance(run.config.value(mark.switch), list):
        return f"add {either(map(format_toml, mark.values))} to {mark.switch}"
    return f"set {mark}"


@rule()
def options_act(run: PlannedRun) -> list[Problem]:
    """A key that is set beside a switch with which nothing reads it would be ignored in silence."""
    return [
        run.problem(
            field.key,
            f"does nothing with {mark.switch} = {format_toml(run.config.value(mark.switch))}",
            f"{_turned_on(run, mark)}, or {field.name} = {format_toml(field.default)}, the default",
        )
        for field, switches in _idle(run)
        if (mark := next((mark for mark in switches if mark.refused), None))
    ]


@note
def options_notes(run: PlannedRun) -> list[str]:
    """The keys that are set and that nothing reads, by what they would act with."""
    idle = defaultdict(list)
    for field, switches in _idle(run):
        idle[" or ".join(dict.fromkeys(map(str, switches)))].append(field.key)
    if run.hardware.device == "cpu":
        idle["a GPU"] = [
            field.key
            for field in run.config.present_fields()
            if field.key in _ON_A_GPU and run.config.value(field.key) != field.default
        ]
    return [
        f"{', '.join(keys)} {'do' if len(keys) > 1 else 'does'} nothing without {needed}"
        for needed, keys in idle.items()
        if keys
    ]


@rule()
def device_is_here(run: PlannedRun) -> list[Problem]:
    """A run that asks for GPUs does not fall back to the CPU."""
    if run.config.training.device != "cuda" or run.hardware.device == "cuda":
        return []
    fix = 'have nvidia-smi show one (driver, PATH, CUDA_VISIBLE_DEVICES), or set it to "auto" or "cpu"'
    return [run.problem("training.device", "there is no GPU here that nvidia-smi shows", fix)]


@rule()
def loader_workers(run: PlannedRun) -> list[Problem]:
    """Two options of the DataLoader speak of its workers."""
    problems = []
    for table in ("training.dataloader", "validation.dataloader"):
        options = run.config.value(table)
        if options.num_workers:
            continue
        for name in ("persistent_workers", "prefetch_factor"):
            if getattr(options, name):
                fix = f"set {table}.num_workers to at least 1, or leave {name} out"
                problems.append(run.problem(f"{table}.{name}", "needs workers, and num_workers is 0", fix))
    return problems


@rule()
def validation_has_one_length(run: PlannedRun) -> list[Problem]:
    """How much is validated is said once."""
    options = run.config.validation
    if not options.enable or options.samples == -1 or options.steps == -1:
        return []
    rule = "counts the batches of a rank, while validation.samples counts samples of all ranks"
    return [run.problem("validation.steps", rule, "leave one of the two out")]
