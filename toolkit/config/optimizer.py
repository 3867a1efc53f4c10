"""Tables for the optimizer and the learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Interval

from toolkit.config.types import (
    Fraction,
    Momentum,
    Name,
    Needs,
    NonNegative,
    NonNegativeFloat,
    OnlyWith,
    Positive,
    PositiveFloat,
    Table,
    UnsupportedValues,
)
from toolkit.config.unsupported import NO_EXPRESSION


class MuonOptions(Table):
    """Muon for the weights of the blocks' linear layers. Keys are named as in torch.optim.Muon."""

    momentum: Momentum = 0.95
    """Decay of the gradients' moving average."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, Interval(ge=1, le=99)] = 5
    """Newton-Schulz iterations per update."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of an update. match_rms_adamw: RMS 0.2 per element like AdamW's, so that both can share
    optimizer.lr; original: rows of norm 1."""


_TORCHS = OnlyWith("optimizer.name", ("AdamW", "Adam", "Muon"), rejected=True)


class ParameterGroup(Table):
    """Parameters with their own options, under a name of your choice. A parameter belongs to the first group,
    in the order of the file, with a matching pattern; the schedule applies to all."""

    params: list[str] = []
    """Name patterns of the parameters, such as tok_embeddings.weight, output.* or *.experts.*."""
    name: Literal["AdamW"] | None = None
    """AdamW: update these parameters by AdamW, in a run with Muon or AdamW8bit. None: optimizer.name."""
    lr: NonNegativeFloat | None = None
    """Peak learning rate. None: optimizer.lr."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay coefficient. None: optimizer.weight_decay. optimizer.no_decay applies in groups too."""


class Optimizer(Table):
    """The optimizer."""

    name: Literal["AdamW", "Adam", "AdamW8bit", "Muon"] = "AdamW"
    """AdamW uses decoupled weight decay and Adam adds it to the gradient. AdamW8bit stores its moments in 8
    bits. Muon orthogonalizes the updates of matrices and uses AdamW for all other parameters."""
    lr: NonNegativeFloat = 8e-4
    """Peak learning rate."""
    beta1: Momentum = 0.9
    """Decay of the first moment."""
    beta2: Momentum = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Ge(1e-37)] = 1e-8
    """Added to the denominator of the update, which is 0 for an element that has had no gradient yet."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay coefficient."""
    no_decay: Annotated[list[str], Needs("optimizer.weight_decay above 0")] = []
    """Name patterns of parameters without weight decay, such as *norm.weight."""
    groups: dict[Name, ParameterGroup] = {}
    """Parameters with their own options, one table [optimizer.groups.NAME] each."""
    layer_lr_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Factor of the learning rate per layer below the head: the last block has it once, the first block of n
    has it n times, the embedding n + 1 times. 1 disables it; 0.9 to 0.99 are common in fine-tuning."""
    loraplus_lr_ratio: Annotated[PositiveFloat, OnlyWith("finetune.adapter", ("lora",), rejected=True)] = 1.0
    """Learning rate of LoRA's B matrices relative to that of the A matrices; 16 in LoRA+ (Hayou et al. 2024,
    arXiv:2402.12354)."""
    implementation: Annotated[Literal["for-loop", "foreach", "fused"], _TORCHS] = "fused"
    """Implementation of the update; fused is the fastest."""
    muon: Annotated[MuonOptions, OnlyWith("optimizer.name", ("Muon",), rejected=True)] = MuonOptions()
    ema_decay: Annotated[float, Interval(gt=0, lt=1)] | None = None
    """Decay per step of an exponential moving average of the trained weights, in fp32, such as 0.999. It is
    saved in checkpoints, and validation also reports its loss. None: no average."""
    early_step_in_backward: bool = False
    """Update each parameter during backward, as soon as its gradient is ready, and free the gradient.
    Incompatible with gradient clipping and accumulation."""

    @property
    def has_groups(self) -> bool:
        """Return whether parameters have different learning rates or configured groups."""
        return bool(self.groups) or self.layer_lr_decay != 1 or self.loraplus_lr_ratio != 1


_DECAYS = OnlyWith("lr_scheduler.decay_type", ("linear", "sqrt", "cosine"), rejected=True)
_IN_STEPS = OnlyWith("lr_scheduler.decay_type", ("step",), rejected=True)


class LRScheduler(Table):
    """Learning-rate schedule: linear warmup, then constant, then decay."""

    warmup_steps: NonNegative = 200
    """Steps of linear warmup."""
    warmup_ratio: Fraction | None = None
    """Warmup as a fraction of the schedule, rounded up to a whole step; replaces warmup_steps."""
    total_steps: Positive | None = None
    """Length of the schedule, if it is not training.steps."""
    decay_ratio: Annotated[Fraction | None, _DECAYS] = None
    """Fraction of the schedule, at its end, over which the rate decays; None: everything after the warmup."""
    decay_type: Annotated[
        Literal["linear", "sqrt", "cosine", "constant", "step", "expression"],
        UnsupportedValues(("expression",), NO_EXPRESSION),
    ] = "linear"
    """Shape of the decay. constant: no decay; step: multiply by gamma every step_size steps."""
    step_size: Annotated[Positive | None, _IN_STEPS] = None
    """Steps between multiplications for decay_type step; None is one epoch."""
    gamma: Annotated[float, Interval(gt=0, le=1), _IN_STEPS] = 0.85
    """Factor for decay_type step."""
    min_lr_factor: Annotated[Fraction, _DECAYS] = 0.0
    """Final learning rate as a fraction of optimizer.lr."""
