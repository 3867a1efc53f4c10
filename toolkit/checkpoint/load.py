"""Load a checkpoint into existing tensors, with verification."""

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

from toolkit.checkpoint.dcp_storage import METADATA, VerifiedReader, read_metadata, tensor_entries
from toolkit.checkpoint.manifest import ADVICE, check_files
from toolkit.distributed.agreement import Ranks
from toolkit.errors import CheckpointError, first_few

_SHOWN = 8  # maximum number of names in a message


def load_tensors(
    folder: Path,
    manifest: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    exclude: Sequence[str],
    verify: bool,
    ranks: Ranks,
) -> None:
    """Load ``tensors`` from ``folder``, as in :meth:`toolkit.checkpoint.manager.CheckpointManager.load`.

    The index is verified first. Shards are verified in a thread while they are read, so the disk is read only
    once. After an error the contents of ``tensors`` are undefined.

    Raises:
            CheckpointError: the same error on every rank.
    """
    files = manifest["files"]
    index = {name: files[name] for name in files if name == METADATA}
    problems = check_files(folder, files, verify=False) or check_files(folder, index, verify=verify)
    _agree(ranks, folder, problems, ADVICE)
    metadata, problems = None, []
    try:
        metadata = read_metadata(folder, files)
    except CheckpointError as error:
        problems = [str(error)]
    _agree(ranks, folder, problems, ADVICE)
    assert metadata is not None
    targets = {name: tensor.detach() for name, tensor in tensors.items() if not is_excluded(name, exclude)}
    _agree(ranks, folder, _mismatches(metadata, targets, exclude, ranks), "set model.* as in that run")
    failure = None
    with ThreadPoolExecutor(1, "verify") as thread:
        verified = thread.submit(check_files, folder, files_to_verify(files, ranks), verify=verify)
        try:
            with ranks.suppress_dcp_warning():
                dcp.load(
                    targets,
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


def is_excluded(name: str, exclude: Sequence[str]) -> bool:
    """Return whether ``name`` is in ``exclude`` or below an entry ("optim" covers
    "optim.norm.weight.step")."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in exclude)


def files_to_verify(files: Mapping[str, dict[str, Any]], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Return the files that this rank verifies: those written by the same rank, which it probably also reads.
    Each file is verified by one rank."""
    writers = {name: int(name.split("_")[2]) for name in files if name != METADATA}
    return {name: files[name] for name, writer in writers.items() if writer % ranks.size == ranks.rank}


def _mismatches(
    metadata: Metadata, targets: Mapping[str, Tensor], exclude: Sequence[str], ranks: Ranks
) -> list[str]:
    """List differences in names and shapes between the checkpoint and this rank's tensors."""
    stored = tensor_entries(metadata)
    problems = []
    missing = [name for name in targets if name not in stored]
    if missing:
        tops = {name.partition(".")[0] for name in missing} - {name.partition(".")[0] for name in stored}
        hint = (
            f" (nothing of {', '.join(sorted(tops))}; checkpoint.exclude_from_loading skips it)"
            if tops
            else ""
        )
        problems.append(f"not in the checkpoint{hint}: {first_few(missing, _SHOWN)}")
    shapes = [
        f"{name} {tuple(stored[name].size)} in the checkpoint, {tuple(tensor.shape)} in the model"
        for name, tensor in targets.items()
        if name in stored and stored[name].size != tensor.shape
    ]
    if shapes:
        problems.append(f"of another shape: {first_few(shapes, _SHOWN)}")
    # Each rank of a pipeline has only some names; names that no rank has are unexpected.
    names = sorted(stored)
    used_by_any = ranks.any_of([name in targets for name in names])
    tops = {name.partition(".")[0] for name, used in zip(names, used_by_any, strict=True) if used}
    extra = [
        name
        for name, used in zip(names, used_by_any, strict=True)
        if not used and name.partition(".")[0] in tops and not is_excluded(name, exclude)
    ]
    if extra:
        problems.append(f"in the checkpoint but not in this model: {first_few(extra, _SHOWN)}")
    return problems


def _agree(ranks: Ranks, folder: Path, problems: Sequence[str], fix: str) -> None:
    all_problems = ranks.gather_problems(problems)
    if all_problems:
        raise CheckpointError("\n  ".join([f"{folder} cannot be loaded:", *all_problems, f"fix:  {fix}"]))
