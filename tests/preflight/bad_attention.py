"""Runs that break the rules of ``rules.attention``."""

from __future__ import annotations

import os

from tests.preflight.bad_runs import H100, V100, Bad, bad

CASES: list[Bad] = [
    bad("attention_runs_on_device", "model.attention=flex", "no backward on CPU", '"sdpa"'),
    bad("attention_runs_on_device", "model.attention=varlen", "CUDA", '"auto"'),
    bad("attention_runs_on_device", "model.attention=flash data.document_mask=false", "sdpa uses the CPU's"),
    bad(
        "triton_has_a_compiler",
        "model.attention=flex",
        "no no-such-compiler here",
        "set CC to a compiler",
        hardware=H100,
        prepare=lambda folder: os.environ.update(CC="no-such-compiler"),  # restored with what conftest set
    ),
    bad("attention_runs_on_device", "model.attention=blockwise", "for CPUs", '"auto"', hardware=H100),
    bad(
        "attention_keeps_documents_apart",
        "model.attention=flash",
        "supports no mask",
        'set it to "varlen"',
        hardware=H100,
    ),
    bad(
        "attention_takes_window",
        "model.attention=flash data.document_mask=false model.name=mistral0.1",
        "the model's, 16 tokens, is shorter than a sequence",
        'set it to "varlen", or training.seq_len to 16 or less',
        hardware=H100,
    ),
    bad(
        "attention_takes_window",
        "model.attention=flash data.document_mask=false model.name=llama4",
        "has no chunked attention, and the model's chunk, 16 tokens, is shorter than a sequence",
        'set it to "varlen", or training.seq_len to 16 or less',
        hardware=H100,
    ),
    *(
        bad(
            "attention_takes_sinks",
            f"model.attention={name} model.name=gpt_oss data.document_mask=false",
            f"{name} does not support the attention sinks",
            'model.attention = "auto"',
            hardware=H100,
            also="attention_takes_window" if name == "flash" else "",
        )
        for name in ("flash", "varlen")
    ),
    bad(
        "attention_takes_precision",
        "model.attention=flash data.document_mask=false training.mixed_precision_param=float32",
        "flash computes in bfloat16",
        'mixed_precision_param = "bfloat16", or model.attention',
        hardware=H100,
    ),
    bad(
        "attention_takes_precision",
        "model.flavor=debugmodel_varlen_attn",  # float32 by itself on such a device
        "varlen computes in bfloat16",
        'set model.attention = "flex"',
        hardware=V100,
    ),
    bad(
        "attention_takes_head_dim",
        "model.attention=auto model.head_dim=8",
        "flex needs a head_dim of at least 16",
        'model.attention = "sdpa"',
        hardware=H100,
    ),
    bad(
        "attention_takes_head_dim",
        "model.attention=varlen model.head_dim=36",
        "a multiple of 8",
        hardware=H100,
    ),
    bad(
        "attention_takes_head_dim",
        "model.attention=flash model.head_dim=320 data.document_mask=false",
        "at most 256",
        hardware=H100,
    ),
]
