"""Rules for Hugging Face weights, based on config.json and file headers."""

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
from toolkit.models.common.parameter_table import EMBEDDING, HEAD
from toolkit.models.common.spec import CONFIG
from toolkit.models.on_disk import read_hf_config
from toolkit.models.parameters import table
from toolkit.models.registry import presets
from toolkit.preflight.planned_run import PlannedRun, note, rule
from toolkit.preflight.rules.model import CHANGEABLE, name_readable
from toolkit.preflight.weight_folders import instead_of_hugging_face
from toolkit.weights.safetensors_header import model_entries

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_SHOWN = 4
_IN_HF = "checkpoint.initial_load_in_hf"


@rule()
def weights_options_act(run: PlannedRun) -> Iterator[Problem]:
    """Check that the options for loading and exporting Hugging Face folders are consistent."""
    options = run.config.checkpoint
    if options.initial_load_in_hf and not options.initial_load_model_only:
        rule = "a Hugging Face folder contains only weights, not the optimizer, step and data position"
        fix = "set checkpoint.initial_load_model_only = true"
        yield run.problem("checkpoint.initial_load_model_only", rule, fix)
    if options.initial_load_in_hf and "model" in options.exclude_from_loading:
        rule = "a Hugging Face folder contains only the model"
        fix = "remove model from it, or set checkpoint.initial_load_in_hf = false"
        yield run.problem("checkpoint.exclude_from_loading", rule, fix)
    every = options.hf_export_interval
    if every and every % options.interval:
        rule = f"must be a multiple of checkpoint.interval, which is {options.interval}: exports follow saves"
        near = options.interval * -(-every // options.interval)
        yield run.problem("checkpoint.hf_export_interval", rule, f"the nearest is {near}")
    if options.push_to_hub is not None:
        yield from _unpushed(run, options.push_to_hub)


def _unpushed(run: PlannedRun, repository: str) -> list[Problem]:
    """Describe why the export could not be uploaded."""
    key = "checkpoint.push_to_hub"
    if not _REPOSITORY.fullmatch(repository):
        return [run.problem(key, "is not a repository name of the Hub", 'write it as "user/name"')]
    if find_spec("huggingface_hub") is None:
        return [run.problem(key, "the package huggingface_hub is not installed", install_command("hf"))]
    return []


@note
def weights_notes(run: PlannedRun) -> Iterator[str]:
    """Note that a different folder than the given one, or only a part of it, is read."""
    start = run.start
    path = run.config.checkpoint.initial_load_path
    if start.weights is None:
        return
    yield from (*_other_classes(run, start.weights), *_no_dropout(start.weights), *_ignored(start.weights))
    if path and start.weights != expand_user(path):
        yield (
            f"checkpoint.initial_load_path {path} is a checkpoint: the Hugging Face folder {start.weights}, "
            "which its run exported at that step, is loaded"
        )


def _no_dropout(folder: Path) -> list[str]:
    try:
        asked = read_object(folder / CONFIG).get("attention_dropout")
    except DataError:
        return []  # another rule reports it
    if not asked:
        return []
    return [f"{folder / CONFIG} has attention_dropout {asked}, which is not applied in training here"]


def _ignored(folder: Path) -> list[str]:
    try:
        _, message = model_entries(folder, read_hf_config(folder))
    except DataError:
        return []  # another rule reports it
    return [message] if message else []


def _other_classes(run: PlannedRun, folder: Path) -> list[str]:
    try:
        theirs = read_hf_config(folder).classifier
    except DataError:
        return []  # another rule reports it
    ours = run.model.classifier if run.model else None
    if ours is None or theirs is None or ours == theirs:
        return []
    labels = [first_few(classifier.labels, _SHOWN) for classifier in (ours, theirs)]
    return [
        f"finetune.classification: the classes are {labels[0]}, and those of {folder} {labels[1]}: the head "
        "is initialized from debug.seed"
    ]


@rule()
def weights_match_model(run: PlannedRun) -> list[Problem]:
    """Check that the configured model matches the weights to load."""
    start = run.start
    if start.weights is None or run.model is None:
        return []
    try:
        theirs = read_hf_config(start.weights)
    except DataError:
        return []  # weights_readable reports it
    changed = [name for name, key in CHANGEABLE.items() if run.config.value(f"model.{key}") is not None]
    if run.model.classifier:  # the run adds its own head
        changed += ["classifier", "tie_embeddings"]
    differing = [
        field.name
        for field in fields(ModelArgs)
        if field.name not in {"max_seq_len", *changed}
        and getattr(theirs, field.name) != getattr(run.model, field.name)
    ]
    if not differing:
        return []
    differences = ", ".join(
        f"{name} {getattr(theirs, name)} (this model: {getattr(run.model, name)})" for name in differing
    )
    allowed = {"max_seq_len", *CHANGEABLE.values()}
    keys = ["name", "flavor", *(key for key in run.config.model.overrides() if key not in allowed)]
    named = [f"model.{key}" for key in keys if run.config.value(f"model.{key}") is not None]
    fix = (
        f"remove {', '.join(named)} (on the command line, None undoes a file's value) to use the model of "
        "config.json"
    )
    for_name = next(_presets_like(theirs), "")
    if for_name:
        fix += f"; its name is {for_name}"
    if differing == ["vocab_size"] and _makes_room(run, theirs):
        return []
    if differing == ["vocab_size"]:
        fix = (
            f"set model.vocab_size = {theirs.vocab_size}, or resize the embedding first: "
            f"llama-toolkit convert hf-to-dcp {start.weights} OUT "
            f"--vocab-size {run.model.vocab_size}"
        )
    rule = f"the model of the weights, {start.weights / CONFIG}, has {differences}"
    return [run.problem(_weights_key(run), rule, fix, *named, _IN_HF)]


def _makes_room(run: PlannedRun, theirs: ModelArgs) -> bool:
    """Return whether loading grows the embedding for new tokens."""
    added = run.config.model.additional_special_tokens
    return bool(added) and run.model is not None and run.model.vocab_size > theirs.vocab_size


@rule(DataError)
def weights_readable(run: PlannedRun) -> list[Problem]:
    """Check that the folder exists and that its tensors have the shapes in its config.json."""
    start = run.start
    if start.weights is None:
        return []
    key, options = _weights_key(run), run.config.checkpoint
    if not start.weights.exists() and (options.initial_load_broadcast or key == _tokenizer_key(run)):
        return []  # possibly only rank 0's node has it; another rule reports a missing tokenizer folder
    wrong = unusable_weights(start.weights, run.config.value(key))
    return [run.problem(key, *wrong, _IN_HF)] if wrong else []


def unusable_weights(folder: Path, value: str) -> tuple[str, str] | None:
    """Return why the Hugging Face ``folder``, which a key with ``value`` names, has no usable weights, and
    the fix; None if it has."""
    if wrong := instead_of_hugging_face(folder, value):
        return wrong
    otherwise = f"{name_readable()} (docs/weights.md lists supported models), or correct the file"
    try:
        theirs = read_hf_config(folder)
        otherwise = "use a folder with complete safetensors files"
        entries, _ = model_entries(folder, theirs)
    except DataError as error:
        rule, _, fix = str(error).partition("\n  fix:  ")
        return rule, fix or otherwise
    rows = table(theirs)
    shapes = {name: entry.shape for name, entry in entries.items()}
    expected = dict(rows.hf_shapes)
    if theirs.tie_embeddings and (head := rows.to_hf(HEAD)) in shapes:
        expected[head] = expected[rows.to_hf(EMBEDDING)]
    if not (differences := "; ".join(_differences(shapes, expected))):
        return None
    rule = f"the files in {folder} do not match the model in its {CONFIG}: {differences}"
    return rule, "use files and config.json of the same model"


@rule()
def tokenizer_matches_weights(run: PlannedRun) -> list[Problem]:
    """Check that the tokenizer is not smaller than that of the weights; a smaller one is probably the wrong
    one."""
    start = run.start
    if start.weights is None or run.vocabulary is None or _tokenizer_key(run) == _weights_key(run):
        return []
    try:
        theirs = vocabulary_size(start.weights)
    except DataError:
        return []  # the folder has no tokenizer
    if run.vocabulary >= theirs:
        return []
    rule = (
        f"the tokenizer has {run.vocabulary} tokens, but that of the weights in {start.weights} has {theirs}"
    )
    local, key = isinstance(start.weights, Path), _tokenizer_key(run)
    fix = f'set {key} to "{start.weights}"' if local else "download that tokenizer, and use its folder"
    return [run.problem(key, rule, fix, _weights_key(run), _IN_HF)]


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


def _differences(shapes: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    missing = [name for name in expected if name not in shapes]
    extra = [name for name in shapes if name not in expected]
    other = [
        f"{name} {shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    groups = {"missing": missing, "unexpected": extra, "wrong shape": other}
    yield from (f"{what}: {first_few(names, _SHOWN)}" for what, names in groups.items() if names)
