"""Rules for the checkpoint that a run starts from, based on its manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields

from toolkit.checkpoint.manifest import check_files, dotted, read_manifest, saved_settings, step_folder
from toolkit.config.optimizer import ParameterGroup
from toolkit.config.schema import fields_by_key, registry
from toolkit.config.toml_text import parse_toml
from toolkit.data.batch_size import n_shards
from toolkit.errors import CheckpointError, DataError, Problem, first_few, quote
from toolkit.finetune.parameters import all_shapes, trained_names
from toolkit.models.common.args import ModelArgs
from toolkit.optim.selection import beyond_adamw
from toolkit.preflight.planned_run import PlannedRun, note, rule
from toolkit.preflight.rules.model import CHANGEABLE

_CURVE = ("model", "finetune", "data", "training", "validation", "optimizer", "lr_scheduler", "loss", "debug")
"""Tables that a resumed run should share with its earlier part."""
_SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "head_dim", "tie_embeddings")
_FREEZING = ("trainable", "frozen", "freeze_first_layers", "freeze_last_layers")
_SHOWN = 8
_AS_BEFORE = "set it as in that run, or use another job.dump_folder"
_FOUND_BY = ("checkpoint.folder", "job.dump_folder", "checkpoint.enable")
"""Keys that locate a run's own checkpoint if no other key selects one."""
_NEW = (
    "family", "qk_norm", "qkv_bias", "out_bias", "sinks", "sliding_window", "full_attention_step",
    "classifier", "irope",
)  # fmt: skip
_SINCE_0_2 = {
    field.name: field.default for field in fields(ModelArgs) if field.name in _NEW
}  # with the values implied by older manifests


@rule(CheckpointError)
def checkpoint_complete(run: PlannedRun) -> list[Problem]:
    """Check that the checkpoint was committed and that its files have their full size."""
    start = run.start
    if start.manifest_error:
        others = ", ".join(map(str, start.steps)) or "none"
        own = f"the steps in {run.checkpoints} are: {others}; -1 selects the newest"
        if start.own:
            return [run.problem(start.loaded_by, start.manifest_error, own, *_FOUND_BY)]
        from toolkit.preflight.weight_folders import instead_of_checkpoint

        fix = instead_of_checkpoint(start.loaded)
        return [run.problem(start.loaded_by, start.manifest_error, fix, *_FOUND_BY)]
    if start.manifest is None:
        return []
    broken = check_files(start.loaded, start.manifest["files"], verify=False)
    fix = f"use another checkpoint than {start.loaded}, or a copy of it"
    if not broken:
        return []
    return [run.problem(start.loaded_by, first_few(broken, 4), fix, *_FOUND_BY)]


@rule(CheckpointError)
def checkpoint_fits_model(run: PlannedRun) -> list[Problem]:
    """Check that the checkpoint has the model's shapes, and the same RoPE and norms unless a key changes
    them."""
    start = run.start
    if start.manifest is None or run.model is None:
        return []
    saved = start.manifest["run"].get("model", {})
    here = json.loads(json.dumps(asdict(run.model)))  # as in a manifest
    saved = saved and _SINCE_0_2 | saved
    changed = [name for name, key in CHANGEABLE.items() if run.config.value(f"model.{key}") is not None]
    names = [*_SHAPE, *_SINCE_0_2, *(name for name in CHANGEABLE if name not in changed)]
    if run.model.classifier and not start.resumes and saved.get("classifier") != here["classifier"]:
        changed += ["classifier", "tie_embeddings"]  # the run adds its own head
    differing = [
        name for name in names if name in saved and name not in changed and saved[name] != here[name]
    ]
    if not differing:
        return []
    rule = ", ".join(f"{name} {quote(saved[name])} (this model: {here[name]})" for name in differing)
    fix = "set model.name, model.flavor and model.* as in that run, or use another job.dump_folder"
    if keys := [f"model.{CHANGEABLE[name]}" for name in differing if name in CHANGEABLE]:
        fix += f"; set {', '.join(keys)} to change it on purpose"
    rule = f"the checkpoint {start.loaded} has {rule}"
    own = [key for name in differing if (key := f"model.{name}") in fields_by_key()]
    return [run.problem(start.loaded_by, rule, fix, *own, "model.flavor", "model.name", *_FOUND_BY)]


@rule(CheckpointError)
def checkpoint_has_adapter(run: PlannedRun) -> list[Problem]:
    """Check that a resumed run trains the checkpoint's adapter, or no adapter if it contains a full model."""
    start = run.start
    if start.manifest is None or not start.resumes:
        return []
    saved = dotted(start.manifest["run"].get("config", "")).get("finetune.adapter", "none")
    if saved == run.config.finetune.adapter:
        return []
    rule = f"the checkpoint {start.loaded} is from a run with finetune.adapter = {saved}"
    return [run.problem("finetune.adapter", rule, _AS_BEFORE, *_FOUND_BY)]


@rule(CheckpointError)
def checkpoint_trains_the_same(run: PlannedRun) -> list[Problem]:
    """Check that a resumed run trains the same parameters and an equivalent adapter."""
    start = run.start
    if start.manifest is None or run.model is None or not start.resumes or checkpoint_has_adapter(run):
        return []
    here, settings = run.config.finetune, saved_settings(start.manifest["run"])
    if not here.chooses and not any(settings.get(f"finetune.{key}") for key in _FREEZING):
        return []
    from toolkit.finetune.saved_options import finetune_of, resume_differences

    saved = finetune_of(start.loaded, start.manifest["run"])
    optimizer = "optimizer" not in start.excluded
    fix = _AS_BEFORE
    if not here.adds:
        fix += f", or reset its optimizer {start.anew('optimizer')}"
    return [
        run.problem(
            key, f"the checkpoint {start.loaded} is from a run with {key} = {quote(value)}", fix, *_FOUND_BY
        )
        for key, value in resume_differences(saved, here, run.model, optimizer=optimizer).items()
    ]


@rule(CheckpointError)
def checkpoint_has_full_model(run: PlannedRun) -> Iterator[Problem]:
    """Check that a checkpoint of another run contains a full model."""
    start = run.start
    if start.manifest is None or start.own or "base" not in start.manifest["run"]:
        return
    fix = (
        f"merge it first: llama-toolkit convert merge BASE {start.loaded} OUT; or start from its "
        f"base and set finetune.adapter_path = {start.loaded}"
    )
    if start.resumes:
        fix += (
            "; in both cases set checkpoint.initial_load_model_only = true, because optimizer, step and data "
            "position are lost"
        )
    yield run.problem(start.loaded_by, f"the checkpoint {start.loaded} contains an adapter but no model", fix)


@rule(CheckpointError)
def checkpoint_has_optimizer(run: PlannedRun) -> Iterator[Problem]:
    """Check that a checkpoint to resume from contains more than the weights."""
    start = run.start
    if start.manifest is None or not start.resumes or not start.manifest["run"].get("model_only"):
        return
    if "optimizer" in start.excluded:
        return
    yield run.problem(
        start.loaded_by,
        f"the checkpoint {start.loaded} contains only the model (checkpoint.last_save_model_only)",
        f"start a new run from it: another job.dump_folder and checkpoint.initial_load_path = "
        f'"{start.loaded}"',
        *_FOUND_BY,
    )


@rule(CheckpointError)
def checkpoint_has_this_optimizer(run: PlannedRun) -> list[Problem]:
    """Check that the optimizer can load the checkpoint's state; only Adam and AdamW share a format."""
    start, key = run.start, "optimizer.name"
    if start.manifest is None or not start.resumes or start.manifest["run"].get("model_only"):
        return []
    name = run.config.optimizer.name
    saved = saved_settings(start.manifest["run"]).get(key, name)
    own = {name, saved} & set(registry(key))  # only their author knows their state format
    if saved == name or {saved, name} == {"Adam", "AdamW"} or own:
        return []
    if "optimizer" in start.excluded:
        return []
    rule = f"the checkpoint {start.loaded} is from a run with {key} = {saved}, whose state {name} cannot load"
    fix = f"set it as in that run, or reset it {start.anew('optimizer')}"
    return [run.problem(key, rule, fix, *_FOUND_BY)]


@rule(CheckpointError)
def checkpoint_has_this_optimizer_by_group(run: PlannedRun) -> list[Problem]:
    """Check that groups select the parameters of each optimizer as they did in the checkpoint."""
    start, options = run.start, run.config.optimizer
    if start.manifest is None or run.model is None or not start.resumes or "optimizer" in start.excluded:
        return []
    if checkpoint_has_optimizer(run) or checkpoint_has_this_optimizer(run):
        return []
    saved = parse_toml(start.manifest["run"].get("config", "")).get("optimizer", {}).get("groups", {})
    groups = {name: ParameterGroup.model_validate(group) for name, group in saved.items()}
    before = options.model_copy(update={"groups": groups})
    shapes = all_shapes(run.model, run.config.finetune)
    changed = [
        name
        for name in trained_names(shapes, run.model, run.config.finetune)
        if beyond_adamw(name, shapes[name], before) != beyond_adamw(name, shapes[name], options)
    ]
    if not changed:
        return []
    of = first_few(sorted(changed), 3)
    rule = f"the checkpoint {start.loaded} has the state of another optimizer of {of}"
    fix = f"set each group's name as in that run, or reset the optimizer {start.anew('optimizer')}"
    keys = [f"optimizer.groups.{name}.name" for name, group in options.groups.items() if group.name]
    return [run.problem(next(iter(keys), "optimizer.name"), rule, fix, *_FOUND_BY)]


@rule(CheckpointError)
def checkpoint_has_average(run: PlannedRun) -> list[Problem]:
    """Check that a checkpoint to resume from has the moving average of weights that the run requests."""
    start, key = run.start, "optimizer.ema_decay"
    if run.config.optimizer.ema_decay is None or start.manifest is None or not start.resumes:
        return []
    saved = start.manifest["run"]
    if "ema" in start.excluded or saved.get("model_only") or saved_settings(saved).get(key) is not None:
        return []
    rule = f"the checkpoint {start.loaded} has no average of its weights"
    return [run.problem(key, rule, f"begin the average at its weights {start.anew('ema')}", *_FOUND_BY)]


@rule(DataError)
def data_position_fits(run: PlannedRun) -> list[Problem]:
    """Check that the keys that define a sample are unchanged. The corpus itself is compared later."""
    start = run.start
    config = run.config
    if start.manifest is None or not start.resumes_data:
        return []
    saved = start.manifest["run"].get("loader")
    if saved is None:
        if checkpoint_has_optimizer(run):
            return []
        key = "checkpoint.exclude_from_loading"
        fix = f"set it to {json.dumps([*config.checkpoint.exclude_from_loading, 'dataloader'])}"
        rule = f"the checkpoint {start.loaded} has no position in the data"
        return [run.problem(key, rule, fix, start.loaded_by, *_FOUND_BY)]
    saved = {"streaming": "shards" in saved, **saved}  # only a stream's data position counts shards
    keys = ("training.seq_len", "data.packing", "data.shuffle", "data.streaming", "debug.seed")
    here = {key: config.value(key) for key in keys} | {"debug.seed": config.debug.seed or 0}
    return [
        run.problem(
            key,
            f"the data position of the checkpoint {start.loaded} was counted with {quote(before)}",
            f"set {key} to that, or restart the data {start.anew('dataloader')}",
            start.loaded_by,
            *_FOUND_BY,
        )
        for key, now in here.items()
        if (before := saved.get(key.rpartition(".")[2], now)) != now
    ]


@rule(DataError)
def stream_resumable(run: PlannedRun) -> list[Problem]:
    """Check that a stream has the same number of shards as before. The files are compared later."""
    start, key = run.start, "training.global_batch_size"
    if start.manifest is None or run.batch is None or not start.resumes_data:
        return []
    saved = start.manifest["run"]
    before, shards = saved.get("global_batch_size"), saved.get("loader", {}).get("shards")
    if not run.config.data.streaming or shards is None or before in (None, run.batch.total):
        return []
    files = getattr(run.opened["training"], "files", ())  # not known yet for a dataset of the Hub
    if not files or (now := n_shards(len(files), run.batch.total)) == shards:
        return []
    rule = f"splits {len(files)} files into {now} shards, but the data position of the checkpoint "
    rule += f"{start.loaded} counts {quote(shards)}"
    fix = f"set {key} to {quote(before)}, as in that run, or restart the data {start.anew('dataloader')}"
    return [run.problem(key, rule, fix, "training.dataset_path", *_FOUND_BY)]


@rule(DataError)
def mixture_resumable(run: PlannedRun) -> list[Problem]:
    """Check that a mixture has the same corpora and shares. The text is compared later."""
    start = run.start
    config = run.config
    if start.manifest is None or not start.resumes_data:
        return []
    saved, now = start.manifest["run"].get("loader", {}), _position_counts(run)
    counted = f"the data position of the checkpoint {start.loaded} was counted with"
    fix = f"restore that, or restart the data {start.anew('dataloader')}"
    before, here = str(saved.get("corpus", ""))[:500], now.get("corpus", "one corpus")
    if before != here and "mixture of " in before + here:
        key = next((f"data.mixture.{name}.weight" for name in config.data.mixture), "training.dataset")
        before = before if before.startswith("mixture of ") else "one corpus"
        rule = f"{counted} {before}, and this run has {here}"
        return [run.problem(key, rule, fix, "training.dataset_path", *_FOUND_BY)] if saved else []
    return [
        run.problem(
            f"data.mixture.{name}.weight",
            f"{counted} a share of {quote(saved[share], str)}, now it is {now[share]}",
            fix,
            *_FOUND_BY,
        )
        for name in config.data.mixture
        if saved.get(share := f"{name}.share", now.get(share)) != now.get(share)
    ]


def _position_counts(run: PlannedRun) -> dict[str, str]:
    """Return the properties of a mixture on which a data position depends; empty if a weight is too small."""
    if not run.config.data.mixture:
        return {}
    from toolkit.data.mixture import identity, quotas
    from toolkit.preflight.rules.mixture import mixture_weights_fit

    if mixture_weights_fit(run):
        return {}

    return identity(quotas(run.config.data.weights))


@rule()
def batch_resumable(run: PlannedRun) -> Iterator[Problem]:
    """Check that a resumed run has the same batch in spite of a changed mesh, unless the data restarts."""
    start = run.start
    if start.manifest is None or run.mesh is None or not start.resumes_data:
        return
    saved = start.manifest["run"]
    dp = saved.get("data_parallel_degree", run.mesh.dp)
    if run.config.training.global_batch_size != -1 or dp == run.mesh.dp:
        return
    yield run.problem(
        "training.global_batch_size",
        f"the checkpoint {start.loaded} was trained at data-parallel degree {dp}, this run has "
        f"{run.mesh.dp}, and -1 would change the batch",
        f"set training.global_batch_size to {saved.get('global_batch_size')}, the batch so far, or "
        f"restart the data {start.anew('dataloader')}",
        *_FOUND_BY,
    )


@rule(CheckpointError)
def steps_are_counted_on(run: PlannedRun) -> list[Problem]:
    """Check that the step count does not restart next to checkpoints of later steps, from which the next
    start would resume."""
    start = run.start
    if run.config.checkpoint.load_only or not start.own or "train_state" not in start.excluded:
        return []
    rule = f"resets the step next to step-{max(start.steps, default=0)}, but the next start loads the "
    rule += "highest step"
    return [run.problem("checkpoint.exclude_from_loading", rule, f"count {start.anew('train_state')}")]


@note
def checkpoint_notes(run: PlannedRun) -> Iterator[str]:
    """Note changes since the checkpoint, and checkpoints of other runs in the same folder."""
    start = run.start
    if start.manifest is None or not start.resumes:
        return
    if changes := list(_changes(run)):
        yield f"changed since {start.loaded}: {', '.join(changes)}"
    yield from _left_out(run)
    own = start.manifest["run"].get("id")
    ids = {step: read_manifest(step_folder(run.checkpoints, step))["run"].get("id") for step in start.steps}
    foreign = [f"step-{step}" for step in start.steps if ids[step] != own]
    if foreign and start.loaded.parent == run.checkpoints:
        yield f"{start.loaded} and {first_few(foreign, 3)} next to it are from different runs"


@note
def new_head_notes(run: PlannedRun) -> list[str]:
    """Note that the head of a classifier with other classes is not loaded."""
    start, ours = run.start, run.model.classifier if run.model else None
    if start.manifest is None or start.resumes or ours is None:
        return []
    theirs = start.manifest["run"].get("model", {}).get("classifier")
    if theirs is None or theirs == json.loads(json.dumps(asdict(ours))):
        return []
    return [
        f"finetune.classification: the classes are {first_few(ours.labels, _SHOWN)}, and {start.loaded} has "
        f"{quote(theirs)}: the head is initialized from debug.seed"
    ]


def _left_out(run: PlannedRun) -> Iterator[str]:
    """Note the effect on the learning-rate schedule if the schedule or the step is not loaded."""
    start = run.start
    if "lr_scheduler" in start.excluded:
        yield (
            f"the learning-rate schedule restarts after {start.loaded}: "
            "checkpoint.exclude_from_loading contains lr_scheduler"
        )
    elif "train_state" in start.excluded:
        yield (
            f"the step restarts after {start.loaded}, but the learning-rate schedule continues: "
            "checkpoint.exclude_from_loading contains train_state but not lr_scheduler"
        )


def _changes(run: PlannedRun) -> Iterator[str]:
    """Yield values that affect training and differ from the checkpoint's; only keys known to both are
    compared."""
    start = run.start
    assert start.manifest is not None
    before = saved_settings(start.manifest["run"])
    now = dotted(run.config.to_toml(origins=False))
    for table in _CURVE:
        yield from (
            f"{key} {quote(was)} → {now[key]!r}"
            for key, was in before.items()
            if key.startswith(f"{table}.") and key in now and was != now[key]
        )
