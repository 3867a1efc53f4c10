"""Export a run's checkpoint as a Hugging Face folder during the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.read_tensor import open_checkpoint
from toolkit.distributed.agreement import Ranks
from toolkit.weights.hf_assets import Companions, configured_add_bos, tokenizer_companions
from toolkit.weights.hf_write import MAX_BYTES, write_hf
from toolkit.weights.open import CheckpointWeights
from toolkit.weights.views import Cast


def export_hf(
    step_folder: Path,
    out: Path,
    *,
    dtype: torch.dtype,
    tokenizer_path: Path | None,
    ranks: Ranks,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Write the model in a committed ``step_folder`` to ``out``, in ``dtype``, with the tokenizer's files.

    Collective: each of ``ranks`` writes some of the files and reads what it needs from the checkpoint. The
    checkpoint was just written and is not verified again. ``out`` is replaced atomically.

    Raises:
        CheckpointError, DataError: on every rank: the checkpoint or tokenizer cannot be read, or the folder
            cannot be written.
    """

    def open_inputs() -> tuple[Metadata, dict[str, Any], Companions]:
        manifest, metadata = open_checkpoint(step_folder, verify=False)
        run, companions = manifest["run"], Companions()
        if tokenizer_path:
            companions = tokenizer_companions(tokenizer_path, add_bos=configured_add_bos(run))
        return metadata, run, companions

    metadata, run, companions = ranks.on_rank_0(open_inputs)
    source = Cast(CheckpointWeights(step_folder, metadata, run), dtype)
    write_hf(
        source, out, tokens=companions.tokens, others=companions.files, ranks=ranks, max_bytes=max_bytes,
        replace=True,
    )  # fmt: skip
