"""Hands a run's checkpoint on as a Hugging Face folder, while the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from toolkit.checkpoint.read_tensor import open_checkpoint
from toolkit.distributed.agreement import Ranks
from toolkit.weights.hf_assets import Companions, asked_bos, tokenizer_companions
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
    """Write the model in a committed ``step_folder`` as ``out``, in ``dtype``, with the tokenizer's files.

    Collective: each of ``ranks`` writes its share of the files, reading what it needs from the checkpoint,
    which has just been written and is not hashed again. ``out`` appears whole; one of before is replaced.

    Raises:
        CheckpointError, DataError: on every rank alike. A checkpoint or tokenizer that cannot be read, or a
            folder that cannot be written.
    """

    def opened() -> tuple[Metadata, dict[str, Any], Companions]:
        manifest, metadata = open_checkpoint(step_folder, verify=False)
        run = manifest["run"]
        return (
            metadata,
            run,
            tokenizer_companions(tokenizer_path, add_bos=asked_bos(run)) if tokenizer_path else Companions(),
        )

    metadata, run, beside = ranks.on_rank_0(opened)
    source = Cast(CheckpointWeights(step_folder, metadata, run), dtype)
    write_hf(
        source, out, tokens=beside.tokens, others=beside.files, ranks=ranks, max_bytes=max_bytes, replace=True
    )
