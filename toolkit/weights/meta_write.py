"""Writes a Meta folder of one part: consolidated.00.pth and params.json.

torch itself lays the file out, from tensors without memory (``skip_data``), and the bytes follow, a tensor at
a time. A tied head is stored under its own name, as Meta's programs expect it, in the bytes of the embedding.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from toolkit.compat import FakeTensorMode, checkpoint_offset
from toolkit.distributed.agreement import Ranks
from toolkit.models.common.spec import PARAMS
from toolkit.models.common.table import EMBEDDING, HEAD
from toolkit.models.registry import spec
from toolkit.weights.folder_write import Folder, Progress, no_progress, write_folder
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.source import Stored, WeightSource
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
    """Write ``source`` as a Meta folder ``out``, with ``others`` (the tokenizer) beside the weights.

    For the rest see :func:`toolkit.weights.folder_write.write_folder`.
    """

    def write(path: Path, names: Sequence[str]) -> None:
        _lay_out(path, in_order(source), tied=source.args.tie_embeddings)
        with path.open("rb+") as file:
            for name, begin in _begins(path).items():
                tensor = source.read(name)
                file.seek(begin)
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                progress(tensor.nbytes)

    form = spec(source.args.family).meta_params()
    assert form, f"Meta's files cannot hold {source.args.family}"
    params = (json.dumps(form.params_json(source.args)) + "\n").encode()
    folder = Folder({PART: list(in_order(source))}, {PARAMS: params, **others}, write, MetaFolder)
    write_folder(source, out, folder, ranks=ranks, progress=progress, check=check)


def _lay_out(path: Path, tensors: Mapping[str, Stored], *, tied: bool) -> None:
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        content = OrderedDict(
            (name, torch.empty(stored.shape, dtype=stored.dtype)) for name, stored in tensors.items()
        )
        if tied:
            content[HEAD] = content[EMBEDDING]
        try:
            torch.save(content, path)
        except RuntimeError as error:  # torch's zip writer speaks of positions in place of a full disk
            raise OSError(f"torch could not write {path.name}, as on a full disk: {error}") from error


def _begins(path: Path) -> dict[str, int]:
    found = torch.load(path, map_location="meta", weights_only=True)
    places = {name: checkpoint_offset(tensor) for name, tensor in found.items()}
    if places.get(HEAD) == places[EMBEDDING]:
        del places[HEAD]
    return places
