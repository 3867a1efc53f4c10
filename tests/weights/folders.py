"""Small models as transformers and Meta's programs would leave them on disk, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FAMILY: dict[str, dict[str, Any]] = {
    "llama2": dict(num_attention_heads=4, num_key_value_heads=4),
    "llama3": dict(num_attention_heads=8, num_key_value_heads=2, rope_theta=5e5),
    "llama3.1": dict(
        num_attention_heads=8,
        num_key_value_heads=1,
        rope_theta=5e5,
        rope_scaling=dict(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama3.2": dict(
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_theta=5e5, tie_word_embeddings=True
    ),
}  # fmt: skip
"""config.json fields of each: GQA 1, 4, 8 and 2; the last is tied and its heads are not dim / n_heads."""


def save_transformers(name: str, folder: Path, *, files: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A member of the family, saved by transformers in about so many files; the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, max_position_embeddings=256
    )
    torch.manual_seed(len(name) + files)
    model = LlamaForCausalLM(LlamaConfig(**(shape | FAMILY[name]))).to(dtype)
    for parameter in model.parameters():  # transformers' own are too small to tell much
        torch.nn.init.normal_(parameter, std=0.3)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=int(size / files * 1.15) + 1)
    return model.eval()


def save_meta(
    tensors: dict[str, Tensor], params: dict[str, Any], folder: Path, *, parts: int, embedding_dim: int
) -> None:
    """Cut whole tensors over parts as Meta's programs do; the embedding along ``embedding_dim``."""
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(params))

    def cut(name: str, tensor: Tensor, part: int) -> Tensor:
        kind = name.split(".")[-2]
        if "norm" in kind:
            return tensor.clone()
        if kind == "tok_embeddings":
            return tensor.chunk(parts, embedding_dim)[part].clone()
        if kind in ("wo", "w2"):
            return tensor.chunk(parts, 1)[part].clone()
        heads = params["n_kv_heads"] if kind in ("wk", "wv") else parts
        return tensor.chunk(min(heads, parts), 0)[part * min(heads, parts) // parts].clone()

    for part in range(parts):
        held = {name: cut(name, tensor, part) for name, tensor in tensors.items()}
        held["rope.freqs"] = torch.zeros(4)
        torch.save(held, folder / f"consolidated.{part:02}.pth")
