"""Rules about weights from and for Hugging Face, as far as config.json and the headers of files tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from toolkit.config.local_paths import expand_user
from toolkit.data.tokenizers.load_tokenizer import vocabulary_size
from toolkit.errors import DataError, Problem, first_few, install_command
from toolkit.io.json_fields import read_object
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.spec import CONFIG
from toolkit.models.common.table import EMBEDDING, HEAD
from toolkit.models.on_disk import read_hf_config
from toolkit.models.parameters import table
from toolkit.models.registry import presets
from toolkit.preflight.planned_run import PlannedRun, note, rule
from toolkit.preflight.rules.model import CHANGEABLE, name_readable
from toolkit.preflight.weight_folders import instead_of_hugging_face
from toolkit.weights.safetensors_header import model_entries

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 4


@rule()
def weights_options_act(run: PlannedRun) -> list[Problem]:
    """Options of weights from or for Hugging Face go together."""
    options, problems = run.config.checkpoint, []
    if options.initial_load_in_hf and not options.initial_load_model_only:
        rule = "a Hugging Face folder has only weights, no optimizer, step and data position"
        fix = "set checkpoint.initial_load_model_only = true"
        problems.append(run.problem("checkpoint.initial_load_model_only", rule, fix))
    if options.initial_load_in_hf and "model" in options.exclude_from_loading:
        rule = "a Hugging Face folder has nothing beside the model"
        fix = "leave model out of it, or set checkpoint.initial_load_in_hf = false"
        problems.append(run.problem("checkpoint.exclude_from_loading", rule, fix))
    every = options.hf_export_interval
    if every and every % options.interval:
        rule = f"must be a multiple of checkpoint.interval, which is {options.interval}: it comes from a save"
        near = options.interval * -(-every // options.interval)
        problems.append(run.problem("checkpoint.hf_export_interval", rule, f"the nearest is {near}"))
    if options.push_to_hub is not None:
        problems += _unpushed(run, options.push_to_hub)
    return problems


def _unpushed(run: PlannedRun, repository: str) -> list[Problem]:
    """Why nothing could be uploaded."""
    key = "checkpoint.push_to_hub"
    if not _REPOSITORY.fullmatch(repository):
        return [run.problem(key, "is no name of a model on the Hub", 'write it as "user/name"')]
    if find_spec("huggingface_hub") is None:
        return [run.problem(key, "the package huggingface_hub is not installed", install_command("hf"))]
    return []


@note
def weights_notes(run: PlannedRun) -> list[str]:
    """Another folder is read than the one that is named, or not all of it."""
    start = run.start
    path = run.config.checkpoint.initial_load_path
    if start.weights is None:
        return []
    notes = [*_other_classes(run, start.weights), *_no_dropout(start.weights), *_ignored(start.weights)]
    if path and start.weights != expand_user(path):
        notes.append(
            f"checkpoint.initial_load_path {path} is a checkpoint: the Hugging Face folder that its run "
            f"wrote at that step is read, {start.weights}"
        )
    return notes


def _no_dropout(folder: Path) -> list[str]:
    try:
        asked = read_object(folder / CONFIG).get("attention_dropout")
    except DataError:
        return []  # another rule tells
    if not asked:
        return []
    return [f"{folder / CONFIG} has attention_dropout {asked}: here attention drops nothing in training"]


def _ignored(folder: Path) -> list[str]:
    try:
        _, said = model_entries(folder, read_hf_config(folder))
    except DataError:
        return []  # another rule tells
    return [said] if said else []


def _other_classes(run: PlannedRun, folder: Path) -> list[str]:
    try:
        theirs = read_hf_config(folder).classifier
    except DataError:
        return []  # another rule tells
    ours = run.model.classifier if run.model else None
    if ours is None or theirs is None or ours == theirs:
        return []
    said = [first_few(classifier.labels, _SHOWN) for classifier in (ours, theirs)]
    return [
        f"finetune.classification: the classes are {said[0]}, and those of {folder} {said[1]}: the head is "
        "drawn from debug.seed"
    ]


@rule()
def weights_are_of_this_model(run: PlannedRun) -> list[Problem]:
    """The model that is named is the one whose weights are to be loaded."""
    start = run.start
    if start.weights is None or run.model is None:
        return []
    try:
        theirs = read_hf_config(start.weights)
    except DataError:
        return []  # of which weights_readable tells
    changed = [name for name, key in CHANGEABLE.items() if run.config.value(f"model.{key}") is not None]
    if run.model.classifier:  # which is put on top of them
        changed += ["classifier", "tie_embeddings"]
    differing = [
        field.name
        for field in fields(ModelArgs)
        if field.name not in {"max_seq_len", *changed}
        and getattr(theirs, field.name) != getattr(run.model, field.name)
    ]
    if not differing:
        return []
    said = ", ".join(
        f"{name} {getattr(theirs, name)} (this model: {getattr(run.model, name)})" for name in differing
    )
    allowed = {"max_seq_len", *CHANGEABLE.values()}
    keys = ["name", "flavor", *(key for key in run.config.model.overrides() if key not in allowed)]
    named = [f"model.{key}" for key in keys if run.config.value(f"model.{key}") is not None]
    fix = (
        f"leave out {', '.join(named)} (on the command line None undoes what a file says): the model is then "
        "that of config.json"
    )
    for_name = next(_presets_like(theirs), "")
    if for_name:
        fix += f"; by name it is {for_name}"
    if differing == ["vocab_size"] and _makes_room(run, theirs):
        return []
    if differing == ["vocab_size"]:
        fix = (
            f"set model.vocab_size = {theirs.vocab_size}, or resize the embedding first: "
            f"python -m tools.convert_weights hf-to-dcp {start.weights} OUT "
            f"--vocab-size {run.model.vocab_size}"
        )
    rule = f"the model of the weights, {start.weights / CONFIG}, has {said}"
    return [run.problem(_weights_key(run), rule, fix)]


def _makes_room(run: PlannedRun, theirs: ModelArgs) -> bool:
    """Say if the embedding grows as it is loaded, for new tokens."""
    added = run.config.model.additional_special_tokens
    return bool(added) and run.model is not None and run.model.vocab_size > theirs.vocab_size


@rule(DataError)
def weights_readable(run: PlannedRun) -> list[Problem]:
    """The folder is there and whole, and its tensors have the shapes that its config.json says."""
    start = run.start
    if start.weights is None:
        return []
    key, options = _weights_key(run), run.config.checkpoint
    if not start.weights.exists() and (options.initial_load_broadcast or key == _tokenizer_key(run)):
        return []  # rank 0's node may have it; or the tokenizer is missed there too, and said to be
    wrong = instead_of_hugging_face(start.weights, run.config.value(key))
    if wrong:
        return [run.problem(key, *wrong)]
    otherwise = f"{name_readable()} (docs/weights.md lists what is read), or correct the file"
    try:
        theirs = read_hf_config(start.weights)
        otherwise = "take a folder of safetensors that is whole"
        entries, _ = model_entries(start.weights, theirs)
    except DataError as error:
        said, _, fix = str(error).partition("\n  fix:  ")
        return [run.problem(key, said, fix or otherwise)]
    rows = table(theirs)
    found = {name: entry.shape for name, entry in entries.items()}
    meant = {row.hf: row.shape for row in rows.values()}
    if theirs.tie_embeddings and (head := rows.to_hf(HEAD)) in found:
        meant[head] = meant[rows.to_hf(EMBEDDING)]
    said = "; ".join(_differences(found, meant))
    rule = f"the files in {start.weights} are not of the model of its {CONFIG}: {said}"
    return [run.problem(key, rule, "take files and config.json of the same model")] if said else []


@rule()
def tokenizer_is_of_weights(run: PlannedRun) -> list[Problem]:
    """Weights that were trained on a tokenizer go on with no smaller one: most likely it is another."""
    start = run.start
    if start.weights is None or run.vocabulary is None or _tokenizer_key(run) == _weights_key(run):
        return []
    try:
        theirs = vocabulary_size(start.weights)
    except DataError:
        return []  # the folder brings none
    if run.vocabulary >= theirs:
        return []
    rule = f"its tokenizer has {run.vocabulary} tokens, that of the weights in {start.weights} has {theirs}"
    here = isinstance(start.weights, Path)
    fix = f'set it to "{start.weights}"' if here else "download that one, and name its folder"
    return [run.problem(_tokenizer_key(run), rule, fix)]


def _weights_key(run: PlannedRun) -> str:
    path = run.config.checkpoint.initial_load_path
    return "checkpoint.initial_load_path" if path else "model.hf_assets_path"


def _tokenizer_key(run: PlannedRun) -> str:
    return "model.tokenizer_path" if run.config.model.tokenizer_path else "model.hf_assets_path"


def _presets_like(args: ModelArgs) -> Iterator[str]:
    for name, flavors in presets().items():
        yield from (
            f'model.name = "{name}", model.flavor = "{flavor}"'
            for flavor, preset in flavors.items()
            if preset == args
        )


def _differences(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    other = [
        f"{name} {found[name]} where {shape} is due"
        for name, shape in expected.items()
        if found.get(name, shape) != shape
    ]
    named = {"missing": missing, "too many": extra, "misshapen": other}
    yield from (f"{what}: {first_few(names, _SHOWN)}" for what, names in named.items() if names)
