"""Adapters with numbers as large as trained ones, on a small model, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.models.small_llama import build, small, tokens_and_labels
from toolkit.config.finetune import Finetune
from toolkit.finetune.apply import apply_finetune
from toolkit.finetune.parameters import added_shapes, trained_names
from toolkit.finetune.saved_adapter import Adapter
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.weights.source import StoredTensor

ARGS = small(n_kv_heads=2, head_dim=8)
TOKENS, _ = tokens_and_labels(2, 40)
LORA: dict[str, Any] = {"rank": 4, "alpha": 16, "target_modules": ["wq", "wk", "wv", "w2"]}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"adapter": "lora", "lora": LORA},
    "rslora": {
        "adapter": "lora",
        "lora": LORA | {"use_rslora": True, "alpha": 3, "target_modules": ["all-linear"]},
    },
    "dora": {"adapter": "lora", "lora": LORA | {"use_dora": True}},
    "some blocks": {"adapter": "lora", "lora": LORA | {"target_modules": ["layers.1.*", "wq"]}},
    "head and embedding": {
        "adapter": "lora",
        "lora": LORA | {"target_modules": ["wq", "lm_head", "embed_tokens"]},
    },
    "norms too": {"adapter": "lora", "lora": LORA, "trainable": ["norm.weight", "layers.0.*_norm.weight"]},
    "prefix": {"adapter": "prefix_tuning", "prefix_tuning": {"num_virtual_tokens": 5}},
    "adaption prompt": {
        "adapter": "llama_adapter",
        "llama_adapter": {"adapter_len": 4, "adapter_layers": 2, "gate": "layer"},
    },
}


class OfModel:
    """The weights of a model in memory, as a source."""

    def __init__(self, model: Decoder, place: Path):
        self.place, self.args = place, model.args
        self.values = {name: it.detach() for name, it in model.named_parameters()}
        self.tensors = {name: StoredTensor(tuple(it.shape), it.dtype) for name, it in self.values.items()}

    def read(self, name: str, region: Any = None, out: Tensor | None = None) -> Tensor:
        value = self.values[name] if region is None else self.values[name][tuple(region)]
        return value.clone() if out is None else out.copy_(value)


def adapter_of(options: Finetune, args: ModelArgs, place: Path) -> Adapter:
    """Random numbers as large as trained ones."""
    generator = torch.Generator().manual_seed(5)
    shapes = added_shapes(args, options)
    base = dict(build(args, torch.float32).named_parameters())
    values = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    for name in values:
        if name.endswith("magnitude"):
            values[name] = 1 + values[name].abs()
        if name.endswith((".keys", ".values", ".prompt", ".gate")):
            values[name] *= 20
    for name in sorted(trained_names(base, args, options)):
        values[name] = base[name].detach() + 0.3 * torch.randn(base[name].shape, generator=generator)
    place.mkdir(parents=True, exist_ok=True)
    return Adapter(place, args, options, values)


def adapted(adapter: Adapter, change: Callable[[Decoder], Decoder] = lambda model: model) -> Decoder:
    """The model that training has, its base changed, with the adapter's numbers."""
    model = change(build(adapter.args, torch.float32))
    apply_finetune(model, adapter.options, frozen_dtype=torch.float32)
    with torch.device("cpu"):
        for name in adapter.values:
            module, _, own = name.rpartition(".")
            value = torch.nn.Parameter(adapter.values[name].clone())
            model.get_submodule(module).register_parameter(own, value)
    return model.eval()


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


def check_close(found: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    worst = (found - expected).abs().max() / expected.abs().max()
    assert worst <= bound
