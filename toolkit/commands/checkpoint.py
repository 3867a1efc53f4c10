"""Manage the checkpoints of a run, without a GPU.

    llama-toolkit checkpoint list FOLDER                   checkpoints, and damaged or incomplete ones
    llama-toolkit checkpoint inspect STEP [--tensors]      content of a checkpoint and the run that saved it
    llama-toolkit checkpoint verify PATH ...               check every file against its hash and the index
    llama-toolkit checkpoint diff STEP OTHER               compare settings and tensors
    llama-toolkit checkpoint prune FOLDER --keep-latest K [--keep-every N] [--dry-run]
    llama-toolkit checkpoint average PATH ... OUT [--last K | --steps N,N]   mean of the weights
    llama-toolkit checkpoint combine BASE OUT ADAPTER=WEIGHT ...   weighted sum of LoRA adapters

FOLDER is a run's folder or its checkpoint folder, STEP a step-N in it, PATH either; each local or in object
storage (s3://bucket/run). average writes OUT/step-0, for checkpoint.initial_load_path and convert dcp-to-hf;
without --last and --steps it takes all steps of each folder. combine writes a PEFT folder, whose rank is the
sum of the ranks; BASE are the weights that the adapters were trained on, and a WEIGHT is 1 if not given.
After PiSSA, combine BASE OUT TRAINED=1 INITIAL=-1 --trained-on RESIDUAL writes a LoRA of the original model.

Exit codes: 0 no problem (for diff: equal), 1 diff found differences, 2 invalid arguments, 3 unusable
checkpoint.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import (
    check_files,
    committed_steps,
    invalid_steps,
    read_manifest,
    saved_settings,
    step_folder,
    step_numbers,
)
from toolkit.checkpoint.retention import step_storage, steps_to_delete
from toolkit.commands.arguments import any_path, command_parser, count, local_path
from toolkit.errors import (
    EXIT_DATA,
    EXIT_ERROR,
    EXIT_FINISHED,
    CheckpointError,
    one_line,
)
from toolkit.hardware import cores
from toolkit.models.on_disk import EXPORTS

GIB = 2**30


def checkpoints_in(folder: Path) -> Path:
    """Find the checkpoint folder, which is ``folder`` itself or inside a run's folder.

    Raises:
        CheckpointError: there is none, or it cannot be listed.
    """
    step_numbers(folder)  # says if it cannot be listed, which glob takes for empty
    inside = [path.parent for path in folder.glob("*/step-*") if path.parent.name != EXPORTS]
    if not folder.is_dir() or not (inside or any(folder.glob("step-*"))):
        raise CheckpointError(f"{folder} is no folder of checkpoints: there is no step-N in it")
    return folder if any(folder.glob("step-*")) else inside[0]


def size(manifest: Mapping[str, Any]) -> int:
    """Return the total size of the files in bytes."""
    return sum(entry["bytes"] for entry in manifest["files"].values())


def list_steps(folder: Path) -> Iterator[str]:
    """Format one line per checkpoint, then folders that are not checkpoints."""
    yield f"{'step':>9}  {'saved at':19}  {'GiB':>8}  {'tokens':>17}  mesh"
    unsound = invalid_steps(folder)
    for step in sorted({*step_numbers(folder)} - unsound.keys()):
        manifest = read_manifest(step_folder(folder, step))
        run = manifest["run"]
        yield (
            f"{step:9}  {manifest['saved_at'][:19].replace('T', ' ')}  {size(manifest) / GIB:8.2f}"
            f"  {run.get('tokens', 0):17,}  {run.get('mesh', '')}"
            f"{'  weights only' if run.get('model_only') else ''}"
        )
    for step, reason in sorted(unsound.items()):
        yield f"{step:9}  no checkpoint: {reason}"
    for path in step_storage(folder).leftovers(folder):
        yield f"{path.name}: left by a process that was killed; the run's next start clears it"


def inspect(step: Path, *, tensors: bool) -> Iterator[str]:
    """Format the manifest; with ``tensors``, also each tensor in DCP's index."""
    manifest = read_manifest(step)
    run = manifest["run"]
    facts = {
        "step": manifest["step"],
        "saved at": manifest["saved_at"],
        "files": f"{len(manifest['files'])}, {size(manifest) / GIB:.2f} GiB",
        "tensors": f"{manifest['tensors']['count']}, {manifest['tensors']['bytes'] / GIB:.2f} GiB",
        "digest": manifest["digest"],
        **{key.replace("_", " "): value for key, value in run.items() if not isinstance(value, dict | str)},
        "mesh": run.get("mesh", ""),
        **{key: _pairs(value) for key, value in run.items() if isinstance(value, dict)},
    }
    yield from (f"{name:22} {value}" for name, value in facts.items())
    if tensors:
        from toolkit.checkpoint.dcp_storage import read_metadata, tensor_entries

        for name, entry in tensor_entries(read_metadata(step, manifest["files"])).items():
            dtype, parts = str(entry.properties.dtype).removeprefix("torch."), len(entry.chunks)
            yield f"{name:60} {dtype:9} {tuple(entry.size)!s:20} in {parts} part{'s'[: parts > 1]}"
    yield from ("", *run.get("config", "").rstrip().splitlines())


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def verify(steps: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Check each of ``steps`` against its hashes and index and return its problems."""
    from toolkit.checkpoint.read_tensor import index_problems

    with ThreadPoolExecutor(cores()) as threads:
        for step in steps:
            try:
                files = read_manifest(step)["files"]
            except CheckpointError as error:
                yield step, [str(error)]
                continue
            one_by_one = [{name: entry} for name, entry in files.items()]
            found = threads.map(lambda file, step=step: check_files(step, file, verify=True), one_by_one)
            problems = [problem for of_file in found for problem in of_file]
            yield step, problems or index_problems(step, files)


def diff(left: Path, right: Path) -> Iterator[str]:
    """Format differences, one per line; reads one tensor at a time."""
    ours, theirs = read_manifest(left), read_manifest(right)
    before, after = (_settings(manifest) for manifest in (ours, theirs))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {before.get(key)!r}, {after.get(key)!r}"
    from toolkit.checkpoint.dcp_storage import read_metadata, tensor_entries
    from toolkit.checkpoint.read_tensor import read_tensor

    for step, problems in verify([left, right]):
        if problems:
            raise CheckpointError(f"{step}: {'; '.join(problems)}")
    here, there = read_metadata(left, ours["files"]), read_metadata(right, theirs["files"])
    names, others = tensor_entries(here), tensor_entries(there)
    for name in sorted(names.keys() | others.keys()):
        if name not in names or name not in others:
            yield f"{name}: only in {left if name in names else right}"
        elif names[name].size != others[name].size:
            yield f"{name}: shape {tuple(names[name].size)}, {tuple(others[name].size)}"
        else:
            x, y = read_tensor(left, here, name), read_tensor(right, there, name)
            if x.dtype != y.dtype:
                yield f"{name}: {x.dtype}, {y.dtype}"
            elif not x.equal(y):
                apart = (x.double() - y.double()).abs()
                yield (
                    f"{name}: {int((x != y).sum()):,} of {x.numel():,} values differ, by at most "
                    f"{apart.max().item():.3g}; the largest value is {x.abs().max().item():.3g}"
                )


def _settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata of the run, such as step and mesh, and its configuration by dotted key."""
    run = manifest["run"]
    plain = {key: value for key, value in run.items() if key not in ("config", "model")}
    return {"step": manifest["step"], **plain, **saved_settings(run)}


def prune(folder: Path, *, keep_latest: int, keep_every: int | None, dry_run: bool) -> Iterator[str]:
    """Delete checkpoints that need not be kept; the best step of a run with ``checkpoint.keep_best`` stays.

    The newest checkpoint is verified first.

    Raises:
        CheckpointError: the newest checkpoint is damaged, or one could not be deleted.
    """
    steps = committed_steps(folder)
    newest = max(steps, default=0)
    run = read_manifest(step_folder(folder, newest))["run"] if steps else {}
    best = run.get("best_step") if saved_settings(run).get("checkpoint.keep_best") else None
    doomed = steps_to_delete(
        steps, newest=newest, keep_latest_k=keep_latest, keep_every_n=keep_every, also_kept=[best]
    )
    if doomed and not dry_run:
        [(verified, problems)] = verify([step_folder(folder, newest)])
        if problems:
            raise CheckpointError(f"nothing deleted: {verified} is damaged: {'; '.join(problems)}")
    for step in doomed:
        if not dry_run:
            try:
                step_storage(folder).delete(folder, step)
            except OSError as error:
                path = step_folder(folder, step)
                raise CheckpointError(f"{path} could not be deleted: {error.strerror}") from None
        yield f"{'would delete' if dry_run else 'deleted'} step-{step}"
    yield f"{len(steps) - len(doomed)} of {len(steps)} kept"


def _weighted(text: str) -> tuple[Path, float]:
    """Parse ADAPTER=WEIGHT."""
    path, _, weight = text.rpartition("=")
    if not path or local_path(text).exists():
        return local_path(text), 1.0
    try:
        if math.isfinite(number := float(weight)):
            return local_path(path), number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: the weight {weight} is not a finite number")


def combine(
    base: Path, out: Path, adapters: Sequence[tuple[Path, float]], *, trained_on: Path | None
) -> Iterator[str]:
    """Write the weighted sum of ``adapters`` as the PEFT folder ``out``, an adapter of ``base``, and yield a
    summary. ``trained_on`` is the model that they were trained on, if it is not ``base``.

    Raises:
        DataError, CheckpointError: an adapter cannot be read or combined, or ``out`` cannot be written.
    """
    import torch

    from toolkit.distributed.agreement import Ranks
    from toolkit.finetune.base import fingerprint
    from toolkit.finetune.combine import combine as combine_adapters
    from toolkit.finetune.open_adapter import open_adapter_on
    from toolkit.finetune.peft_folder import write_peft
    from toolkit.weights.open import open_weights

    weights = open_weights(trained_on or base)
    found = combine_adapters([(open_adapter_on(path, weights), weight) for path, weight in adapters])
    known = dict(found.base or {}) | {"place": str(base)}
    if trained_on:
        known["fingerprint"] = fingerprint(open_weights(base))
    write_peft(replace(found, base=known), out, dtype=torch.float32, others={}, ranks=Ranks(alone=True))
    yield f"{out}: a LoRA of rank {found.options.lora.rank}, the sum of {len(adapters)} adapters"


def average(paths: Sequence[Path], out: Path, *, last: int | None, steps: Sequence[int]) -> Iterator[str]:
    """Write the mean of the weights of checkpoints, reading one tensor at a time.

    ``last`` selects the newest ones of each folder in ``paths``, and ``steps`` the steps with these numbers.

    Raises:
        CheckpointError, DataError: fewer than two are chosen, one is missing or damaged, or they differ.
    """
    chosen: list[Path] = []
    for path in paths:
        if path.name.startswith("step-"):
            chosen.append(path)
            continue
        folder = checkpoints_in(path)
        found = committed_steps(folder)
        if missing := sorted(set(steps) - set(found)):
            available = ", ".join(map(str, found))
            raise CheckpointError(f"{folder} has no step {missing[0]}; available: {available}")
        chosen += [step_folder(folder, it) for it in (steps or (found[-last:] if last else found))]
    if len(set(chosen)) < max(2, len(chosen)):
        listed = ", ".join(map(str, chosen))
        raise CheckpointError(f"a mean needs two or more checkpoints, each once, and these are {listed}")
    from tqdm import tqdm

    from toolkit.weights.average import open_average, write_average

    mean = open_average(chosen)
    size = sum(stored.nbytes for stored in mean.tensors.values())
    with tqdm(total=size, unit="B", unit_scale=True, disable=None, desc="average") as bar:
        written = write_average(mean, out, progress=bar.update)
    yield f"{written}: the mean of {', '.join(map(str, chosen))}"
    yield f"to train from it: --checkpoint.initial_load_path {written}"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("checkpoint", __doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list").add_argument("folder", type=any_path)
    shown = actions.add_parser("inspect")
    shown.add_argument("step", type=any_path)
    shown.add_argument("--tensors", action="store_true")
    actions.add_parser("verify").add_argument("paths", type=any_path, nargs="+")
    compared = actions.add_parser("diff")
    compared.add_argument("step", type=any_path)
    compared.add_argument("other", type=any_path)
    pruned = actions.add_parser("prune")
    pruned.add_argument("folder", type=any_path)
    pruned.add_argument("--keep-latest", type=int, required=True, metavar="K")
    pruned.add_argument("--keep-every", type=int, metavar="N")
    pruned.add_argument("--dry-run", action="store_true")
    averaged = actions.add_parser("average")
    averaged.add_argument("paths", type=any_path, nargs="+", metavar="PATH")
    averaged.add_argument("out", type=local_path, metavar="OUT")
    combined = actions.add_parser("combine")
    combined.add_argument("base", type=local_path, metavar="BASE")
    combined.add_argument("out", type=local_path, metavar="OUT")
    combined.add_argument("adapters", type=_weighted, nargs="+", metavar="ADAPTER=WEIGHT")
    combined.add_argument(
        "--trained-on", type=local_path, metavar="MODEL", help="if it is not BASE: PiSSA's RESIDUAL"
    )
    which = averaged.add_mutually_exclusive_group()
    which.add_argument("--last", type=count, metavar="K", help="the newest K steps of each folder")
    which.add_argument("--steps", type=_steps, metavar="N,N", default=(), help="these steps of each folder")
    return parser


def _steps(text: str) -> list[int]:
    return [count(it) for it in text.split(",")]


def _verify(paths: Sequence[Path]) -> int:
    steps: list[Path] = []
    for path in paths:
        if path.name.startswith("step-"):
            steps.append(path)
        else:
            folder = checkpoints_in(path)
            found = [step_folder(folder, step) for step in step_numbers(folder)]
            if not found:
                raise CheckpointError(f"there is no checkpoint in {folder}")
            steps += found
    damaged = 0
    for step, problems in verify(steps):
        damaged += bool(problems)
        print(one_line(f"{step}: {'; '.join(problems) or 'sound'}"), flush=True)
    return EXIT_DATA if damaged else EXIT_FINISHED


def main(argv: Sequence[str]) -> int:
    """Run the program with ``argv`` and return the exit code."""
    parser = _parser()
    asked = parser.parse_args(argv)
    if asked.action == "verify":
        return _verify(asked.paths)
    if asked.action == "list":
        lines = list_steps(checkpoints_in(asked.folder))
    elif asked.action == "inspect":
        lines = inspect(asked.step, tensors=asked.tensors)
    elif asked.action == "diff":
        lines = diff(asked.step, asked.other)
    elif asked.action == "combine":
        lines = combine(asked.base, asked.out, asked.adapters, trained_on=asked.trained_on)
    elif asked.action == "average":
        if (asked.last or asked.steps) and all(it.name.startswith("step-") for it in asked.paths):
            parser.error("--last and --steps choose steps of a folder, and each PATH is a step")
        lines = average(asked.paths, asked.out, last=asked.last, steps=asked.steps)
    else:
        if asked.keep_latest < 1 or (asked.keep_every or 1) < 1:
            parser.error("--keep-latest and --keep-every are at least 1")
        lines = prune(
            checkpoints_in(asked.folder),
            keep_latest=asked.keep_latest,
            keep_every=asked.keep_every,
            dry_run=asked.dry_run,
        )
    printed = 0
    for line in lines:
        printed += 1
        print(one_line(line), flush=True)
    return EXIT_ERROR if asked.action == "diff" and printed else EXIT_FINISHED
