"""A block launches no more kernels than it did, which in eager mode is what a host needs its time for.

Counted on a CPU, where a norm is several operators of what on CUDA is one fused kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.kernel_counts import Kernels
from tests.models.small_llama import VOCAB, build, small, tokens_and_labels
from toolkit.config.finetune import Finetune
from toolkit.config.parallelism import ActivationCheckpoint
from toolkit.finetune.apply import apply_finetune
from toolkit.models.common.decoder import Decoder
from toolkit.parallel.activation_checkpoint import apply_activation_checkpoint

ROWS, LENGTH = 2, 40
TOKENS, LABELS = tokens_and_labels(ROWS, LENGTH)
DOCUMENTS = (torch.arange(LENGTH) // 7).expand(ROWS, LENGTH)


def _counts(loss: Callable[[], Tensor]) -> tuple[Counter[str], Counter[str]]:
    with Kernels() as kernels:
        total = loss()
        forward = kernels.counts.copy()
        total.backward()
    return forward, kernels.counts - forward


def _a_block(loss_of: Callable[[int], Callable[[], Tensor]]) -> tuple[Counter[str], Counter[str]]:
    """Forward and backward of one block more."""
    (forward, backward), (more, more_back) = (_counts(loss_of(layers)) for layers in (1, 2))
    return more - forward, more_back - backward


def _ours(
    dtype: torch.dtype, *, packed: bool = False, mode: str = "none", lora: bool = False
) -> tuple[Counter[str], Counter[str]]:
    def loss_of(layers: int) -> Callable[[], Tensor]:
        model: Decoder = build(small(n_layers=layers), dtype)
        if lora:
            apply_finetune(model, Finetune(adapter="lora"), frozen_dtype=dtype)
        apply_activation_checkpoint(model.layers, ActivationCheckpoint(mode=mode))  # type: ignore[arg-type]
        return lambda: model(TOKENS, labels=LABELS, documents=DOCUMENTS if packed else None)

    return _a_block(loss_of)


def _theirs(dtype: torch.dtype) -> tuple[Counter[str], Counter[str]]:
    def loss_of(layers: int) -> Callable[[], Tensor]:
        config = LlamaConfig(
            hidden_size=64,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
            intermediate_size=96,
            head_dim=32,
            vocab_size=VOCAB,
            attn_implementation="sdpa",
            use_cache=False,
        )
        model = LlamaForCausalLM(config).to(dtype)
        return lambda: model(TOKENS, labels=LABELS).loss

    return _a_block(loss_of)


FP32, BF16 = torch.float32, torch.bfloat16
# Kernels of forward and of backward. bf16 adds the casts around norms and rotations, a mask what makes it one
# of numbers, full checkpointing the forward again.
MOST = {
    "fp32": ({"dtype": FP32}, 26, 55),
    "bf16": ({"dtype": BF16}, 34, 65),
    "bf16, packed": ({"dtype": BF16, "packed": True}, 37, 65),
    "bf16, checkpointed": ({"dtype": BF16, "mode": "full"}, 34, 99),
    "bf16, LoRA": ({"dtype": BF16, "lora": True}, 38, 66),
}


@pytest.mark.parametrize("case", MOST)
def test_a_block_launches_no_more_kernels_than_it_did(case: str) -> None:
    how, in_forward, in_backward = MOST[case]
    forward, backward = _ours(**how)  # type: ignore[arg-type]
    assert forward.total() <= in_forward, forward
    assert backward.total() <= in_backward, backward
    assert (
        forward["mm"] + forward["addmm"] >= 7 and forward["_scaled_dot_product_flash_attention_for_cpu"] == 1
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_block_launches_fewer_kernels_than_that_of_transformers(dtype: torch.dtype) -> None:
    ours, theirs = (sum(part.total() for part in parts) for parts in (_ours(dtype), _theirs(dtype)))
    assert ours < theirs
