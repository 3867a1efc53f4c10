"""Rules about the checkpoint that a run starts from, as far as its manifest tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields

from toolkit.checkpoint.manifest import check_files, dotted, read_manifest, saved_settings, step_folder
from toolkit.config.schema import added
from toolkit.data.batch_size import n_shards
from toolkit.errors import CheckpointError, DataError, Problem, first_few, quote
from toolkit.models.common.args import ModelArgs
from toolkit.preflight.planned_run import PlannedRun, note, rule
from toolkit.preflight.rules.model import CHANGEABLE

_CURVE = ("model", "finetune", "data", "training", "validation", "optimizer", "lr_scheduler", "loss", "debug")
"""Tables that a run which goes on is expected to share with the run so far."""
_SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "head_dim", "tie_embeddings")
_FREEZING = ("trainable", "frozen", "freeze_first_layers", "freeze_last_layers")
_SHOWN = 8
_AS_BEFORE = "set it as in that run, or name another job.dump_folder"
_SINCE_0_2 = {
    field.name: field.default
    for field in fields(ModelArgs)
    if field.name in ("family", "qk_norm", "qkv_bias", "sliding_window", "classifier")
}  # with what was meant before


@rule(CheckpointError)
def checkpoint_complete(run: PlannedRun) -> list[Problem]:
    """The checkpoint was committed, and its files are there in their full size."""
    start = run.start
    if start.manifest_error:
        others = ", ".join(map(str, start.steps)) or "none"
        own = f"the steps in {run.checkpoints} are: {others}; -1 takes the newest"
        if start.own:
            return [run.problem(start.loaded_by, start.manifest_error, own)]
        from toolkit.preflight.weight_folders import instead_of_checkpoint

        fix = instead_of_checkpoint(start.loaded)
        return [run.problem(start.loaded_by, start.manifest_error, fix)]
    if start.manifest is None:
        return []
    broken = check_files(start.loaded, start.manifest["files"], verify=False)
    fix = f"take another checkpoint than {start.loaded}, or a copy of it"
    return [run.problem(start.loaded_by, first_few(broken, 4), fix)] if broken else []


@rule(CheckpointError)
def checkpoint_fits_model(run: PlannedRun) -> list[Problem]:
    """The weights are of this model: of its shapes, and of its RoPE and norms unless a key changes them."""
    start = run.start
    if start.manifest is None or run.model is None:
        return []
    saved = start.manifest["run"].get("model", {})
    here = json.loads(json.dumps(asdict(run.model)))  # as a manifest has it
    saved = saved and _SINCE_0_2 | saved
    changed = [name for name, key in CHANGEABLE.items() if run.config.value(f"model.{key}") is not None]
    names = [*_SHAPE, *_SINCE_0_2, *(name for name in CHANGEABLE if name not in changed)]
    if run.model.classifier and not start.resumes and saved.get("classifier") != here["classifier"]:
        changed += ["classifier", "tie_embeddings"]  # of its own, put on top of the backbone
    differing = [
        name for name in names if name in saved and name not in changed and saved[name] != here[name]
    ]
    if not differing:
        return []
    said = ", ".join(f"{name} {quote(saved[name])} (this model: {here[name]})" for name in differing)
    fix = "set model.name, model.flavor and model.* as in that run, or another job.dump_folder"
    if keys := [f"model.{CHANGEABLE[name]}" for name in differing if name in CHANGEABLE]:
        fix += f"; giving {', '.join(keys)} changes it on purpose"
    return [run.problem(start.loaded_by, f"the checkpoint {start.loaded} has {said}", fix)]


@rule(CheckpointError)
def checkpoint_has_adapter(run: PlannedRun) -> list[Problem]:
    """A run that goes on trains the adapter that its checkpoint holds, or none where it holds a model."""
    start = run.start
    if start.manifest is None or not start.resumes:
        return []
    saved = dotted(start.manifest["run"].get("config", "")).get("finetune.adapter", "none")
    if saved == run.config.finetune.adapter:
        return []
    rule = f"the checkpoint {start.loaded} is of a run with finetune.adapter = {saved}"
    return [run.problem("finetune.adapter", rule, _AS_BEFORE)]


@rule(CheckpointError)
def checkpoint_trains_the_same(run: PlannedRun) -> list[Problem]:
    """A run that goes on trains the parameters that it has trained, and an adapter of the same meaning."""
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
        fix += f", or start its optimizer anew {start.anew('optimizer')}"
    return [
        run.problem(key, f"the checkpoint {start.loaded} is of a run with {key} = {quote(value)}", fix)
        for key, value in resume_differences(saved, here, run.model, optimizer=optimizer).items()
    ]


@rule(CheckpointError)
def checkpoint_is_whole(run: PlannedRun) -> list[Problem]:
    """A run that starts from another's checkpoint finds a whole model there."""
    start = run.start
    if start.manifest is None or start.own or "base" not in start.manifest["run"]:
        return []
    fix = (
        f"merge it first: python -m tools.convert_weights merge BASE {start.loaded} OUT; or name its base "
        f"here and finetune.adapter_path = {start.loaded}"
    )
    if start.resumes:
        fix += (
            "; either way set checkpoint.initial_load_model_only = true: optimizer, step and data position "
            "do not come along"
        )
    return [
        run.problem(start.loaded_by, f"the checkpoint {start.loaded} holds an adapter, and no model", fix)
    ]


@rule(CheckpointError)
def checkpoint_has_optimizer(run: PlannedRun) -> list[Problem]:
    """A run goes on from more than the weights."""
    start = run.start
    if start.manifest is None or not start.resumes or not start.manifest["run"].get("model_only"):
        return []
    if "optimizer" in start.excluded:
        return []
    return [
        run.problem(
            start.loaded_by,
            f"the checkpoint {start.loaded} holds only the model (checkpoint.last_save_model_only)",
            f"start a new run from it: another job.dump_folder and checkpoint.initial_load_path = "
            f'"{start.loaded}"',
        )
    ]


@rule(CheckpointError)
def checkpoint_has_this_optimizer(run: PlannedRun) -> list[Problem]:
    """A run goes on with the state of its optimizer, which those of the toolkit do not share but for Adam and
    AdamW."""
    start, key = run.start, "optimizer.name"
    if start.manifest is None or not start.resumes or start.manifest["run"].get("model_only"):
        return []
    name = run.config.optimizer.name
    saved = saved_settings(start.manifest["run"]).get(key, name)
    own = {name, saved} & set(added(key))  # whose state only its author knows
    if saved == name or {saved, name} == {"Adam", "AdamW"} or own:
        return []
    if "optimizer" in start.excluded:
        return []
    rule = f"the checkpoint {start.loaded} is of a run with {key} = {saved}, whose state {name} does not have"
    fix = f"set it as in that run, or start anew {start.anew('optimizer')}"
    return [run.problem(key, rule, fix)]


@rule(DataError)
def data_position_fits(run: PlannedRun) -> list[Problem]:
    """The position in the data counts samples, which these keys define (the corpus is compared later)."""
    start = run.start
    config = run.config
    if start.manifest is None or not start.resumes or "dataloader" in start.excluded:
        return []
    saved = start.manifest["run"].get("loader")
    if saved is None:
        if checkpoint_has_optimizer(run):
            return []
        key = "checkpoint.exclude_from_loading"
        fix = f"set it to {json.dumps([*config.checkpoint.exclude_from_loading, 'dataloader'])}"
        return [run.problem(key, f"the checkpoint {start.loaded} has no position in the data", fix)]
    saved = {"streaming": "shards" in saved, **saved}  # which a stream counts beside its samples
    keys = ("training.seq_len", "data.packing", "data.shuffle", "data.streaming", "debug.seed")
    here = {key: config.value(key) for key in keys} | {"debug.seed": config.debug.seed or 0}
    return [
        run.problem(
            key,
            f"the data position of the checkpoint {start.loaded} was counted with {quote(before)}",
            f"set it to that, or start the data anew {start.anew('dataloader')}",
        )
        for key, now in here.items()
        if (before := saved.get(key.rpartition(".")[2], now)) != now
    ]


@rule(DataError)
def stream_resumable(run: PlannedRun) -> list[Problem]:
    """The batch deals the files of a stream out to as many shards as the position counts (the files are
    compared later)."""
    start, key = run.start, "training.global_batch_size"
    if start.manifest is None or run.batch is None or not start.resumes or "dataloader" in start.excluded:
        return []
    saved = start.manifest["run"]
    before, shards = saved.get("global_batch_size"), saved.get("loader", {}).get("shards")
    if not run.config.data.streaming or shards is None or before in (None, run.batch.total):
        return []
    files = getattr(run.opened["training"], "files", ())  # of a dataset of the hub they are not known yet
    if not files or (now := n_shards(len(files), run.batch.total)) == shards:
        return []
    rule = f"the shards of {len(files)} files are {now}, and the data position of the checkpoint "
    rule += f"{start.loaded} counts {quote(shards)}"
    fix = f"set it to {quote(before)}, as in that run, or start the data anew {start.anew('dataloader')}"
    return [run.problem(key, rule, fix)]


@rule(DataError)
def mixture_resumable(run: PlannedRun) -> list[Problem]:
    """The position in the data counts samples of certain parts and shares (the text is compared later)."""
    start = run.start
    config = run.config
    if start.manifest is None or not start.resumes or "dataloader" in start.excluded:
        return []
    saved, now = start.manifest["run"].get("loader", {}), _position_counts(run)
    counted = f"the data position of the checkpoint {start.loaded} was counted with"
    fix = f"go back to that, or start the data anew {start.anew('dataloader')}"
    before, here = str(saved.get("corpus", ""))[:500], now.get("corpus", "one corpus")
    if before != here and "mixture of " in before + here:
        key = next((f"data.mixture.{name}.weight" for name in config.data.mixture), "training.dataset")
        before = before if before.startswith("mixture of ") else "one corpus"
        return [run.problem(key, f"{counted} {before}, and this run has {here}", fix)] if saved else []
    return [
        run.problem(
            f"data.mixture.{name}.weight",
            f"{counted} a share of {quote(saved[share], str)}, now it is {now[share]}",
            fix,
        )
        for name in config.data.mixture
        if saved.get(share := f"{name}.share", now.get(share)) != now.get(share)
    ]


def _position_counts(run: PlannedRun) -> dict[str, str]:
    """Facts of a mixture that the position in the data depends on; none where a weight is too small."""
    if not run.config.data.mixture:
        return {}
    from toolkit.data.mixture import identity, quotas
    from toolkit.preflight.rules.mixture import mixture_weights_fit

    if mixture_weights_fit(run):
        return {}

    return identity(quotas({name: part.weight for name, part in run.config.data.mixture.items()}))


@rule()
def batch_resumable(run: PlannedRun) -> list[Problem]:
    """A batch that follows the mesh would change in the middle of a run that goes on elsewhere, and with it
    the place in the data, unless that is left out."""
    start = run.start
    if start.manifest is None or run.mesh is None or not start.resumes or "dataloader" in start.excluded:
        return []
    saved = start.manifest["run"]
    dp = saved.get("data_parallel_degree", run.mesh.dp)
    if run.config.training.global_batch_size != -1 or dp == run.mesh.dp:
        return []
    return [
        run.problem(
            "training.global_batch_size",
            f"the checkpoint {start.loaded} was trained at data-parallel degree {dp}, this run has "
            f"{run.mesh.dp}, and -1 would change the batch",
            f"set it to {saved.get('global_batch_size')}, which was the batch so far, or start the data anew "
            f"{start.anew('dataloader')}",
        )
    ]


@rule(CheckpointError)
def steps_are_counted_on(run: PlannedRun) -> list[Problem]:
    """Steps are not counted anew beside checkpoints of higher ones, which the next start would go on from."""
    start = run.start
    if run.config.checkpoint.load_only or not start.own or "train_state" not in start.excluded:
        return []
    rule = f"leaves train_state out beside step-{max(start.steps, default=0)}, and the next start takes the "
    rule += "highest step"
    return [run.problem("checkpoint.exclude_from_loading", rule, f"count {start.anew('train_state')}")]


@note
def checkpoint_notes(run: PlannedRun) -> list[str]:
    """Tell what sets the run apart from the one so far, and of checkpoints of other runs beside its own."""
    start = run.start
    if start.manifest is None or not start.resumes:
        return []
    changes = list(_changes(run))
    said = [f"not as in {start.loaded}: {', '.join(changes)}"] if changes else []
    said += _left_out(run)
    own = start.manifest["run"].get("id")
    ids = {step: read_manifest(step_folder(run.checkpoints, step))["run"].get("id") for step in start.steps}
    strange = [f"step-{step}" for step in start.steps if ids[step] != own]
    if strange and start.loaded.parent == run.checkpoints:
        said.append(f"{start.loaded} is of another run than {first_few(strange, 3)} beside it")
    return said


@note
def new_head_notes(run: PlannedRun) -> list[str]:
    """Tell that the head of a classifier of other classes is not taken."""
    start, ours = run.start, run.model.classifier if run.model else None
    if start.manifest is None or start.resumes or ours is None:
        return []
    theirs = start.manifest["run"].get("model", {}).get("classifier")
    if theirs is None or theirs == json.loads(json.dumps(asdict(ours))):
        return []
    return [
        f"finetune.classification: the classes are {first_few(ours.labels, _SHOWN)}, and {start.loaded} has "
        f"{quote(theirs)}: the head is drawn from debug.seed"
    ]


def _left_out(run: PlannedRun) -> Iterator[str]:
    """Tell what becomes of the schedule of the learning rate where it, or the step, is not loaded."""
    start = run.start
    if "lr_scheduler" in start.excluded:
        yield (
            f"the schedule of the learning rate starts again after {start.loaded}: "
            "checkpoint.exclude_from_loading names lr_scheduler"
        )
    elif "train_state" in start.excluded:
        yield (
            f"steps are counted anew after {start.loaded}, and the schedule of the learning rate goes on: "
            "checkpoint.exclude_from_loading names train_state without lr_scheduler"
        )


def _changes(run: PlannedRun) -> Iterator[str]:
    """The values that shape a run's curve and are not those of the checkpoint's; of keys that both know."""
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
