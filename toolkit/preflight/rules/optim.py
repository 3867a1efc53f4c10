"""Rules for the optimizer: weight decay, and updates during backward."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.name_patterns import unmatched
from toolkit.config.schema import registry
from toolkit.errors import Problem, closest, first_few
from toolkit.finetune.parameters import all_shapes, trained_names
from toolkit.optim.groups import group_of
from toolkit.optim.selection import beyond_adamw
from toolkit.preflight.planned_run import PlannedRun, note, rule

_EARLY = "optimizer.early_step_in_backward"
_SHOWN = 8


@rule()
def no_decay_matches(run: PlannedRun) -> list[Problem]:
    """Check that each no-decay pattern matches a parameter; otherwise the intended parameter would decay."""
    return _unmatched(run, "optimizer.no_decay")


@rule()
def groups_apply(run: PlannedRun) -> Iterator[Problem]:
    """Check that each group sets an option of a trained parameter, and that each of its patterns matches."""
    options, finetune, model = run.config.optimizer, run.config.finetune, run.model
    if model is None:
        return
    shapes = all_shapes(model, finetune)
    trained = trained_names(shapes, model, finetune)
    used = {group_of(name, options) for name in trained}
    alone = options.model_copy(update={"groups": {}})
    beyond = {group_of(name, options) for name in trained if beyond_adamw(name, shapes[name], alone)}
    for name, group in options.groups.items():
        key = f"optimizer.groups.{name}"
        yield from (found := _unmatched(run, f"{key}.params"))
        if not group.params:
            fix = 'set it to a list such as ["tok_embeddings.weight", "output.*"]'
            yield run.problem(f"{key}.params", "a group needs name patterns of its parameters", fix)
        elif not found and name not in used:
            rule = "matches only parameters that are frozen or in groups before it"
            yield run.problem(f"{key}.params", rule, "remove the group, or set it before the others")
        if name in used and group.name and name not in beyond:
            rule = f"with optimizer.name = {options.name}, AdamW or Adam updates these parameters anyway"
            if options.name in registry("optimizer.name"):
                rule = f"optimizer.name = {options.name} is registered, and updates all parameters itself"
            yield run.problem(f"{key}.name", rule, "remove it", "optimizer.name")
        if group.lr is None and group.weight_decay is None and group.name is None:
            rule = f"[{key}] sets no option, so it has no effect"
            fix = "set its lr, weight_decay or name, or remove the group"
            yield run.problem(f"{key}.params", rule, fix)
        if group.lr is not None and options.lr == 0:
            rule = f"{key}.lr is scheduled as a multiple of it"
            fix = "set it above 0; finetune.frozen freezes parameters"
            yield run.problem("optimizer.lr", rule, fix)


@rule()
def average_is_used(run: PlannedRun) -> list[Problem]:
    """Check that the moving average of the weights is saved or validated, including by the last save."""
    key, checkpoint = "optimizer.ema_decay", run.config.checkpoint
    if run.config.optimizer.ema_decay is None:
        return []
    saves = checkpoint.enable and not checkpoint.load_only
    if not saves and not run.config.validation.enable:
        rule = "has no effect without checkpoints and validation"
        return [run.problem(key, rule, "set checkpoint.enable or validation.enable, or remove it")]
    if saves and checkpoint.last_save_model_only:
        other = "checkpoint.last_save_model_only"
        rule = f"saves the last weights without their average, which {key} asks for"
        return [run.problem(other, rule, "set it to false", key)]
    return []


def _unmatched(run: PlannedRun, key: str) -> list[Problem]:
    """Return a problem for each pattern of ``key`` that matches no parameter."""
    if run.model is None:
        return []
    names = list(all_shapes(run.model, run.config.finetune))
    # Blocks are equal, so the first one represents all.
    kinds = [name for name in names if not name.startswith("layers.") or name.startswith("layers.0.")]
    return [
        run.problem(key, f'"{pattern}" matches no parameter', _similar(pattern, kinds))
        for pattern in unmatched(run.config.value(key), names)
    ]


def _similar(pattern: str, kinds: list[str]) -> str:
    """Suggest names that contain the pattern's words, else the most similar name, else a few names."""
    words = pattern.replace("*", " ").split()
    near = [name for name in kinds if words and all(word.strip(".").lower() in name for word in words)]
    bare = closest(pattern.replace("*", ""), kinds)
    shown = near or ([bare] if bare else kinds)
    return f"use names of parameters such as {first_few(shown, _SHOWN)}; * matches any characters"


@rule()
def early_step_alone(run: PlannedRun) -> Iterator[Problem]:
    """Check that updates in backward are not combined with gradient accumulation or a global gradient
    norm."""
    training = run.config.training
    if not run.config.optimizer.early_step_in_backward:
        return
    without = f"or remove {_EARLY}"
    if training.max_norm != float("inf"):
        rule = f"{_EARLY} updates each parameter before the global gradient norm is known, so it cannot clip"
        fix = f"set training.max_norm = inf, {without}"
        yield run.problem("training.max_norm", rule, fix, _EARLY)
    if run.batch and run.mesh and run.batch.accumulation > 1:
        total, local, count, dp = run.batch.total, run.batch.local, run.batch.accumulation, run.mesh.dp
        rule = (
            f"{total} samples = {dp} data-parallel × {local} local × {count} accumulated, but {_EARLY} "
            "updates in every backward: a step can only be one micro-batch"
        )
        key = "training.global_batch_size"
        fix = f"set {key} to {local * dp}, raise training.local_batch_size to {local * count}, {without}"
        yield run.problem(key, rule, fix)
    if training.enable_cpu_offload:
        rule = (
            f"gradients of an offloaded model are in CPU memory anyway; {_EARLY} would free none on the "
            "device and make backward wait for each update"
        )
        yield run.problem("training.enable_cpu_offload", rule, "remove one of the two")


@note
def optim_notes(run: PlannedRun) -> Iterator[str]:
    """Note options that have less effect than expected."""
    if run.config.optimizer.early_step_in_backward and run.mesh and run.mesh.dp_replicate > 1:
        yield (
            f"{_EARLY} saves no memory with {run.mesh.dp_replicate} replicas: torch keeps the gradients "
            "reduced over them until backward ends"
        )
