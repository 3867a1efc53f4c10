"""LoRA layers, as far as no other library and no mesh is needed to judge them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from toolkit.config.finetune import LoRA
from toolkit.finetune.lora import LoRALinear, drop
from toolkit.hardware import simulate


def _saved(layer: LoRALinear, x: Tensor) -> int:
    """Bytes that the dropout of a forward saves, beyond its result."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        drop(x, layer.dropout)
    return sum(tensor.nbytes for tensor in kept)


def test_a_dry_run_counts_the_mask_of_dropout_as_cuda_saves_it() -> None:
    layer = LoRALinear(nn.Linear(8, 8, bias=False), LoRA(rank=2, dropout=0.5))
    x = torch.randn(16, 8, requires_grad=True)
    assert _saved(layer, x) >= 4 * x.numel()
    with simulate("cuda"):
        assert _saved(layer, x) == x.numel()


def test_dropout_is_off_in_evaluation() -> None:
    layer = LoRALinear(nn.Linear(8, 8, bias=False), LoRA(rank=2, dropout=0.5))
    for factor in (layer.lora_a, layer.lora_b):
        nn.init.normal_(factor)
    x = torch.ones(64, 8)
    for kind in ("cpu", "cuda"):
        with simulate(kind):
            assert len(layer.eval()(x).detach().unique(dim=0)) == 1
            assert len(layer.train()(x).detach().unique(dim=0)) > 1
