"""Runs that break the rules of ``rules.tensor_context_parallel``."""

from __future__ import annotations

from tests.preflight.bad_runs import CP, H100, TP, V100, bad

ASYNC = "parallelism.enable_async_tensor_parallel"
ROTATE = "parallelism.context_parallel_rotate_method"
COMPILED = "compile.enable compile.cache_folder=cache"

CASES = [
    bad(
        "tensor_parallel_divides",
        f"{TP}=3 model.vocab_size=4353 training.seq_len=255",
        "must divide n_heads, which is 16, and n_kv_heads, which is 16",
        "1, 2, 4, 8 or 16",
        world=3,
    ),
    bad(
        "tensor_parallel_divides",
        f"{TP}=8 model.n_kv_heads=4",
        "must divide n_kv_heads, which is 4",
        "tensor_parallel_degree to 1, 2 or 4",
        world=8,
    ),
    bad(
        "tensor_parallel_divides",
        f"{TP}=2 model.vocab_size=4353",
        "must divide vocab_size, which is 4353",
        "model.vocab_size = 4354",
        world=2,
    ),
    bad(
        "tensor_parallel_divides",
        f"{TP}=2 model.ffn_dim=767",
        "must divide ffn_dim, which is 767",
        "model.ffn_dim = 768",
        world=2,
    ),
    bad("async_tensor_parallel_runs", f"{ASYNC} {TP}=2 {COMPILED}", "NVLink", "this is CPU", world=2),
    bad("async_tensor_parallel_runs", f"{ASYNC} {TP}=2", "this is Tesla V100", world=2, hardware=V100),
    bad(
        "async_tensor_parallel_runs",
        f"{ASYNC} {TP}=2",
        "the model is not compiled",
        "compile.enable = true",
        world=2,
        hardware=H100,
    ),
    bad(
        "async_tensor_parallel_runs",
        f"{ASYNC} {TP}=2 {COMPILED} compile.components=loss",
        '"model" in compile.components',
        world=2,
        hardware=H100,
    ),
    bad(
        "async_tensor_parallel_runs",
        f"{ASYNC} {TP}=2 {COMPILED} compile.backend=aot_eager",
        "compile.backend is aot_eager",
        'compile.backend = "inductor"',
        world=2,
        hardware=H100,
    ),
    bad(
        "sequence_divides",
        f"training.seq_len=252 {CP}=4",
        "2·cp = 8",
        "training.seq_len to 256 or parallelism.context_parallel_degree to 2",
        world=4,
    ),
    bad(
        "sequence_divides",
        f"training.seq_len=254 {CP}=4 parallelism.context_parallel_load_balancer=None",
        "a multiple of cp = 4",
        world=4,
    ),
    bad(
        "sequence_divides",
        f"validation.seq_len=252 validation.enable {CP}=2 {TP}=2",
        "2·cp = 4 × tp = 2, that is 8",
        world=4,
    ),
    bad(
        "ring_takes_sinks",
        f"{ROTATE}=alltoall {CP}=2 model.name=gpt_oss",
        "ring attention does not support the attention sinks",
        'set it to "allgather"',
        world=2,
    ),
    bad(
        "ring_has_a_kernel",
        f"{ROTATE}=alltoall {CP}=2 data.document_mask=false model.attention=flex",
        "is not flex",
        'model.attention = "flash"',
        world=2,
        hardware=H100,
    ),
    bad(
        "ring_has_a_kernel",
        f"{ROTATE}=alltoall {CP}=2 data.document_mask=false training.mixed_precision_param=float32",
        "computes in bfloat16",
        'training.mixed_precision_param = "bfloat16"',
        world=2,
        hardware=H100,
    ),
    bad(
        "ring_has_a_kernel",
        f"{ROTATE}=alltoall {CP}=2 data.document_mask=false model.head_dim=36",
        "at most 256, not 36",
        "another model.head_dim",
        world=2,
        hardware=H100,
    ),
    bad(
        "ring_has_a_kernel",
        f"{ROTATE}=alltoall {CP}=2 data.document_mask=false model.name=mistral0.1",
        "has no sliding window, and the model's, 16 tokens",
        'training.seq_len to 16 or less, or keep "allgather"',
        world=2,
        hardware=H100,
    ),
    bad(
        "ring_has_a_kernel",
        f"{ROTATE}=alltoall {CP}=2 data.document_mask=false model.name=llama4",
        "has no chunked attention, and the model's chunk, 16 tokens",
        'training.seq_len to 16 or less, or keep "allgather"',
        world=2,
        hardware=H100,
    ),
]
