"""Writes a Meta folder of one part: consolidated.00.pth and params.json.

torch itself lays the file out, from tensors without memory (``skip_data``), and the bytes follow. A tied
head is stored under its own name, as Meta's programs expect it, in the bytes of the embedding.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.distributed.agreement import Ranks
from toolkit.models.common.spec import PARAMS
from toolkit.models.registry import spec
from toolkit.weights.fill import File, Folder, write_folder
from toolkit.weights.meta_folder import MetaFolder
from toolkit.weights.source import EMBEDDING, HEAD, Stored, WeightSource
from toolkit.weights.views import in_order

PART = "consolidated.00.pth"


def write_meta(
    source: WeightSource,
    out: Path,
    *,
    others: Mapping[str, bytes],
    ranks: Ranks,
    progress: Callable[[int], None] | None = None,
    check: Callable[[WeightSource], None] | None = None,
) -> None:
    """Write ``source`` as a Meta folder ``out``, with ``others`` (the tokenizer) beside the weights.

    For the rest see :func:`toolkit.weights.fill.write_folder`.
    """

    tensors, tied = in_order(source), source.args.tie_embeddings
    form = spec(source.args.family).meta_params()
    assert form, f"Meta's files cannot hold {source.args.family}"
    folder = Folder(
        files=[File(PART, list(tensors), lambda path: _lay_out(path, tensors, tied=tied), _begins)],
        others={PARAMS: (json.dumps(form.params_json(source.args)) + "\n").encode(), **others},
        opened=MetaFolder,
        arrange=lambda name, block: block,
        head_rows=lambda name: 1,
    )
    write_folder(source, out, folder, ranks=ranks, progress=progress, check=check)


def _lay_out(path: Path, tensors: Mapping[str, Stored], *, tied: bool) -> None:
    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        content = OrderedDict(
            (name, torch.empty(stored.shape, dtype=stored.dtype)) for name, stored in tensors.items()
        )
        if tied:
            content[HEAD] = content[EMBEDDING]
        torch.save(content, path)


def _begins(path: Path) -> dict[str, int]:
    found = torch.load(path, map_location="meta", weights_only=True)
    places = {name: tensor.untyped_storage()._checkpoint_offset for name, tensor in found.items()}
    if places.get(HEAD) == places[EMBEDDING]:
        del places[HEAD]
    return places
