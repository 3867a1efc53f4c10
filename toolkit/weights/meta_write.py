"""Write Meta folders with one weight file: consolidated.00.pth and params.json.

torch writes the file's layout from fake tensors (``skip_data``). The data is then written one tensor at a
time. A tied head is stored under its own name, as Meta's programs expect, and shares the embedding's bytes.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from toolkit.compat import FakeTensorMode, checkpoint_offset
from toolkit.distributed.agreement import Ranks
from toolkit.models.common.parameter_table import EMBEDDING, HEAD
from toolkit.models.common.spec import PARAMS
from toolkit.models.registry import spec
from toolkit.weights.folder_write import Folder, Progress, no_progress, write_folder
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.source import StoredTensor, WeightSource
from toolkit.weights.views import in_order

PART = "consolidated.00.pth"


def write_meta(
    source: WeightSource,
    out: Path,
    *,
    others: Mapping[str, bytes],
    ranks: Ranks,
    progress: Progress = no_progress,
    check: Callable[[WeightSource], None] | None = None,
) -> None:
    """Write ``source`` as a Meta folder ``out``, with the files ``others`` (the tokenizer).

    The other arguments are those of :func:`toolkit.weights.folder_write.write_folder`.
    """

    def write(path: Path, names: Sequence[str]) -> None:
        _write_layout(path, in_order(source), tied=source.args.tie_embeddings)
        with path.open("rb+") as file:
            for name, begin in _offsets(path).items():
                tensor = source.read(name)
                file.seek(begin)
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                progress(tensor.nbytes)

    meta_params = spec(source.args.family).meta_params()
    assert meta_params, f"Meta's format does not support {source.args.family}"
    params = (json.dumps(meta_params.params_json(source.args)) + "\n").encode()
    folder = Folder({PART: list(in_order(source))}, {PARAMS: params, **others}, write, MetaFolder)
    write_folder(source, out, folder, ranks=ranks, progress=progress, check=check)


def _write_layout(path: Path, tensors: Mapping[str, StoredTensor], *, tied: bool) -> None:
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        content = OrderedDict(
            (name, torch.empty(stored.shape, dtype=stored.dtype)) for name, stored in tensors.items()
        )
        if tied:
            content[HEAD] = content[EMBEDDING]
        try:
            torch.save(content, path)
        except RuntimeError as error:  # torch's zip writer reports a wrong position if the disk is full
            raise OSError(f"torch could not write {path.name}, as on a full disk: {error}") from error


def _offsets(path: Path) -> dict[str, int]:
    content = torch.load(path, map_location="meta", weights_only=True)
    offsets = {name: checkpoint_offset(tensor) for name, tensor in content.items()}
    if offsets.get(HEAD) == offsets[EMBEDDING]:
        del offsets[HEAD]
    return offsets
