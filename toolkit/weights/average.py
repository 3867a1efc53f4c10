"""The mean of the weights of several checkpoints of one model, computed while they are read.

Averaging the last checkpoints of a run removes noise of the last steps, as a decay of the learning rate does
(LAWA, Kaddour 2022, arXiv:2209.14981). An average of runs that start from the same weights is a model soup
(Wortsman et al. 2022, arXiv:2203.05482).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.checkpoint.manifest import step_folder
from toolkit.checkpoint.read_tensor import open_checkpoint
from toolkit.errors import DataError, first_few
from toolkit.weights.dcp_write import write_dcp
from toolkit.weights.folder_write import Progress
from toolkit.weights.open import CheckpointWeights
from toolkit.weights.source import Region
from toolkit.weights.views import View, check_complete

_SHOWN = 4


class Averaged(View):
    """The mean of ``sources``, summed in at least fp32, in their dtypes.

    Raises:
        DataError: they are not of one model, or are only an adapter.
    """

    def __init__(self, sources: Sequence[CheckpointWeights]):
        super().__init__(sources[-1])
        self.sources = sources
        for source in sources:
            if "base" in source.run:
                raise DataError(
                    f"{source.place} has only an adapter: means of its factors are not those of its updates\n"
                    "  fix:  average whole models, or train the adapter with optimizer.ema_decay"
                )
            differing = [
                name
                for name in self.tensors.keys() | source.tensors.keys()
                if self.tensors.get(name) != source.tensors.get(name)
            ]
            if differing or source.args != self.args:
                what = first_few(sorted(differing), _SHOWN) if differing else "model args"
                raise DataError(f"{source.place} and {self.place} are of different models: {what}")
        check_complete(self)

    def read(self, name: str, region: Region | None = None, out: Tensor | None = None) -> Tensor:
        dtype = self.tensors[name].dtype
        total = self.sources[0].read(name, region).to(torch.promote_types(dtype, torch.float32))
        for source in self.sources[1:]:
            total += source.read(name, region)
        mean = total.div_(len(self.sources)).to(dtype)
        return mean if out is None else out.copy_(mean)


def open_average(steps: Sequence[Path]) -> Averaged:
    """Open the mean of the checkpoints ``steps``, after checking their hashes.

    Raises:
        DataError, CheckpointError: one is damaged, or they are not of one model.
    """
    opened = ((step, *open_checkpoint(step)) for step in steps)
    return Averaged([CheckpointWeights(step, index, manifest["run"]) for step, manifest, index in opened])


def write_average(average: Averaged, out: Path, *, progress: Progress) -> Path:
    """Write the mean as a model-only checkpoint, to ``out`` if it is named step-N, else to its step-0.
    Returns the folder.

    Raises:
        DataError: it exists, or would be a step of a run.
        CheckpointError: it cannot be written.
    """
    folder = out if out.name.startswith("step-") else step_folder(out, 0)
    of_runs = {it.place.parent for it in average.sources}
    if folder.parent.resolve() in {it.resolve() for it in of_runs if isinstance(it, Path)}:
        raise DataError(f"{folder.parent} has steps of a run, which might resume from it: use another OUT")
    last = average.sources[-1].run
    kept = ("config", "model", "tokens", "mesh", "special_tokens", "tokenizer", "versions")
    run = {key: last[key] for key in kept if key in last}
    averaged = [str(source.place) for source in average.sources]
    write_dcp(average, folder, run | {"model_only": True, "averaged": averaged}, progress=progress)
    return folder
