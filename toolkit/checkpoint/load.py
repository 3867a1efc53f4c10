"""Reads a checkpoint into tensors that exist already, after checking that it fits and is what was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.dcp_storage import METADATA, VerifiedReader, read_metadata, tensors_of
from toolkit.checkpoint.manifest import ADVICE, check_files
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, first_few

_SHOWN = 8


def load_tensors(
    folder: Path,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    exclude: Sequence[str],
    verify: bool,
    ranks: Ranks,
) -> None:
    """Fill ``tensors`` from ``folder``; see :meth:`toolkit.checkpoint.manager.CheckpointManager.load`.

    The index is verified first, the shards while they are read, in a thread: their bytes come from the disk
    once. So after an error ``tensors`` may hold anything.

    Raises:
        CheckpointError: the same on every rank.
    """
    files = manifest["files"]
    index = {name: files[name] for name in files if name == METADATA}
    unsound = check_files(folder, files, verify=False) or check_files(folder, index, verify=verify)
    _agree(ranks, folder, unsound, ADVICE)
    metadata, problems = None, []
    try:
        metadata = read_metadata(folder, files)
    except CheckpointError as error:
        problems = [str(error)]
    _agree(ranks, folder, problems, ADVICE)
    assert metadata is not None
    wanted = {name: tensor.detach() for name, tensor in tensors.items() if not excluded(name, exclude)}
    _agree(ranks, folder, _misfits(metadata, wanted, exclude, ranks), "set model.* as in that run")
    failure = None
    with ThreadPoolExecutor(1, "verify") as thread:
        verified = thread.submit(check_files, folder, share(files, ranks), verify=verify)
        try:
            with ranks.quiet():
                dcp.load(
                    wanted,
                    storage_reader=_reader(folder, metadata),
                    planner=DefaultLoadPlanner(flatten_state_dict=False),
                    process_group=ranks.group,
                )
        except CheckpointException as error:
            failure = error
    _agree(ranks, folder, verified.result(), ADVICE)
    if failure:
        causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(failure.failures.items()))
        raise CheckpointError(f"{folder} could not be read: {causes}") from failure


def _reader(folder: Path, metadata: Metadata) -> VerifiedReader:
    if isinstance(folder, Path):
        return VerifiedReader(folder, metadata)
    from toolkit.checkpoint.remote_storage import RemoteReader

    return RemoteReader(folder, metadata)


def excluded(name: str, exclude: Sequence[str]) -> bool:
    """Say if ``name`` is one of ``exclude`` or lies under one ("optim" covers "optim.norm.weight.step")."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in exclude)


def share(files: Mapping[str, dict[str, Any]], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """This rank's part of the shards, so that each is hashed once: those that the same rank wrote, which it
    most likely reads as well."""
    writers = {name: int(name.split("_")[2]) for name in files if name != METADATA}
    return {name: files[name] for name, writer in writers.items() if writer % ranks.size == ranks.rank}


def _misfits(
    metadata: Metadata, wanted: Mapping[str, Tensor], exclude: Sequence[str], ranks: Ranks
) -> list[str]:
    """Differences in names and shapes between the checkpoint and this rank's tensors."""
    stored = tensors_of(metadata)
    problems = []
    missing = [name for name in wanted if name not in stored]
    if missing:
        tops = {name.partition(".")[0] for name in missing} - {name.partition(".")[0] for name in stored}
        hint = (
            f" (nothing of {', '.join(sorted(tops))}; checkpoint.exclude_from_loading leaves it out)"
            if tops
            else ""
        )
        problems.append(f"not in the checkpoint{hint}: {first_few(missing, _SHOWN)}")
    shapes = [
        f"{name} {tuple(stored[name].size)} there, {tuple(tensor.shape)} here"
        for name, tensor in wanted.items()
        if name in stored and stored[name].size != tensor.shape
    ]
    if shapes:
        problems.append(f"of another shape: {first_few(shapes, _SHOWN)}")
    # Ranks of a pipeline each hold some of the names: what no rank asks for is too much.
    names = sorted(stored)
    asked = ranks.any_of([name in wanted for name in names])
    tops = {name.partition(".")[0] for name, used in zip(names, asked, strict=True) if used}
    extra = [
        name
        for name, used in zip(names, asked, strict=True)
        if not used and name.partition(".")[0] in tops and not excluded(name, exclude)
    ]
    if extra:
        problems.append(f"in the checkpoint but not in this model: {first_few(extra, _SHOWN)}")
    return problems


def _agree(ranks: Ranks, folder: Path, problems: Sequence[str], fix: str) -> None:
    found = ranks.gather_problems(problems)
    if found:
        raise CheckpointError("\n  ".join([f"{folder} cannot be loaded:", *found, f"fix:  {fix}"]))
