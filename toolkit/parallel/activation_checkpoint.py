"""Activation checkpointing: keep the input of a block and compute the rest again in backward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


@dataclass(frozen=True)
class ActivationCheckpointing:
    """``mode`` "none" keeps all activations, "full" only the inputs of blocks, "selective" does the
    latter for every ``every``-th block, the first included, "op" recomputes what is cheap for its size,
    "memory_budget" leaves it to torch.compile to keep the part ``memory_budget`` of the activations. The
    rest are torch.utils.checkpoint's own.
    """

    mode: str = "none"
    every: int = 1
    early_stop: bool = False
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    debug: bool = False
    memory_budget: float = 0.5
    pareto_folder: Path | None = None


def apply_activation_checkpoint(blocks: nn.ModuleDict, options: ActivationCheckpointing) -> None:
    """Wrap the blocks in place."""
    if options.mode == "none":
        return
    stride = 1 if options.mode == "full" else options.every
    for index, name in enumerate(list(blocks)):
        if index % stride == 0:
            blocks[name] = checkpoint_wrapper(
                blocks[name],
                early_stop=options.early_stop,
                preserve_rng_state=options.preserve_rng_state,
                determinism_check=options.determinism_check,
                debug=options.debug,
            )
