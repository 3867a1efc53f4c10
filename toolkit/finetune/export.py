"""Export the adapter in a run's checkpoint, as a PEFT folder or merged with its base."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.checkpoint.manifest import read_manifest
from toolkit.distributed.agreement import Ranks
from toolkit.finetune.merge import Merged
from toolkit.finetune.open_adapter import open_adapter_of
from toolkit.finetune.peft_folder import write_peft
from toolkit.weights.hf_assets import configured_add_bos, tokenizer_companions
from toolkit.weights.hf_write import write_hf
from toolkit.weights.load import open_on_all_ranks
from toolkit.weights.open import open_weights
from toolkit.weights.source import WeightSource
from toolkit.weights.views import Cast


def export_peft(step: Path, out: Path, *, dtype: torch.dtype, tokenizer_path: Path, ranks: Ranks) -> None:
    """Write the adapter in a committed ``step`` as a PEFT folder ``out``, with the tokenizer's files.

    Collective; rank 0 writes. ``out`` is replaced atomically.

    Raises:
        CheckpointError, DataError: on every rank: the checkpoint or tokenizer cannot be read, PEFT does not
            support the adapter, or the folder cannot be written.
    """

    def write() -> None:
        adapter = open_adapter_of(step, verify=False)
        files = tokenizer_companions(tokenizer_path, add_bos=configured_add_bos(adapter.run)).files
        write_peft(adapter, out, dtype=dtype, others=files, ranks=Ranks(alone=True), replace=True)

    ranks.on_rank_0(write)


def export_merged(
    step: Path, out: Path, *, dtype: torch.dtype, tokenizer_path: Path, ranks: Ranks, max_bytes: int
) -> None:
    """Write the adapter in a committed ``step``, merged with its base, as a Hugging Face folder.

    Collective: each of ``ranks`` reads the base and writes some of the files.

    Raises:
        CheckpointError, DataError: as in :func:`export_peft`; or the base can no longer be read.
    """

    def open_merged() -> WeightSource:
        base = open_weights(read_manifest(step)["run"]["base"]["place"], verify=False)
        return Cast(Merged(base, open_adapter_of(step, verify=False), at_least=dtype), dtype)

    source = open_on_all_ranks(open_merged, group=ranks.group)
    assert source is not None
    companions = ranks.on_rank_0(
        lambda: tokenizer_companions(tokenizer_path, add_bos=configured_add_bos(read_manifest(step)["run"]))
    )
    write_hf(
        source, out, tokens=companions.tokens, others=companions.files, ranks=ranks, max_bytes=max_bytes,
        replace=True,
    )  # fmt: skip
