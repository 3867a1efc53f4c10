"""Time and memory of each attention back end on this device, forward and backward, for Llama's shapes.

    python -m benchmarks.attention [--repeats 10] [--output benchmarks/results/attention_<device>.md]
    python -m benchmarks.attention --small --output FILE: one small shape, to see that all of it runs

A layer of Llama 3.2 1B and one of 3.1 8B, causal over whole rows and within documents of 1 to 1,023 tokens,
on CUDA at 2,048 and 8,192 tokens in bfloat16; on CPU a quarter of the heads, shorter, in bfloat16 and fp32.
Making the mask, which a forward does once for all layers, is timed apart.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from toolkit.hardware import cores
from toolkit.models.common.attention import AttentionBackend, attention_backend

BACKENDS = {"cuda": ("sdpa", "flash", "flex", "varlen"), "cpu": ("sdpa", "blockwise")}
DTYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.bfloat16, torch.float32)}
LACKS = {
    "cuda": " Flash cannot keep documents apart; blockwise is for CPUs.",
    "cpu": " Not on CPU: flash, which is CUDA's, flex, which has no backward there, and varlen, which has no "
    "kernel.",
}
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    """B rows of S tokens, H query heads, K key heads of E dimensions."""

    model: str
    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        sizes = f"B {self.rows}, S {self.length:,}, H {self.heads}, K {self.kv_heads}, E {self.head_dim}"
        return f"{self.model}: {sizes}"


SHAPES = {
    "cuda": [
        Shape(model, rows, length, 32, 8, head_dim)
        for model, head_dim in (("1B", 64), ("8B", 128))
        for rows, length in ((8, 2048), (2, 8192))
    ],
    "cpu": [
        Shape(f"a quarter of {model}", 1, length, 8, 2, head_dim)
        for model, head_dim in (("1B", 64), ("8B", 128))
        for length in (512, 2048)
    ],
}


SMALL = Shape("a sliver", 1, 256, 4, 2, 64)


def documents_of(shape: Shape) -> Tensor:
    """Ids (B, S) of documents whose lengths are drawn evenly from 1 to 1,023, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(shape.rows):
        lengths = torch.randint(1, 1024, (shape.length,), generator=generator)
        rows.append(torch.repeat_interleave(torch.arange(shape.length), lengths)[: shape.length])
    return torch.stack(rows)


def _median_ms(repeats: int, synchronize: Callable[[], None], work: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats + 3):  # three that compile, choose kernels and fill caches
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[3:])


def measure(
    backend: AttentionBackend,
    shape: Shape,
    documents: Tensor | None,
    device: str,
    dtype: torch.dtype,
    repeats: int,
) -> str:
    """Cells of a row: ms of the mask, ms of forward and backward, MiB above inputs and gradients."""
    on_cuda = device == "cuda"
    synchronize = torch.cuda.synchronize if on_cuda else lambda: None
    q, k, v = leaves = [
        torch.randn(
            shape.rows, shape.length, n, shape.head_dim, dtype=dtype, device=device, requires_grad=True
        )
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    asked = (documents, shape.rows, shape.length, torch.device(device))
    gradient = torch.randn_like(q)
    before = torch.cuda.memory_allocated() if on_cuda else 0
    mask_ms = _median_ms(repeats, synchronize, lambda: backend.mask(*asked))
    mask = backend.mask(*asked)

    def forward_backward() -> None:
        torch.autograd.grad(backend(q, k, v, mask), leaves, gradient)

    ms = _median_ms(repeats, synchronize, forward_backward)
    if not on_cuda:
        return f"{mask_ms:.2f} | {ms:.1f} | not counted"
    torch.cuda.reset_peak_memory_stats()
    forward_backward()
    extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in leaves)
    return f"{mask_ms:.2f} | {ms:.2f} | {extra / 2**20:,.0f}"


def table(device: str, shapes: Sequence[Shape], repeats: int) -> list[str]:
    """Rows of Markdown, printed as they come."""
    rows = []
    for dtype, shape in product(DTYPES[device], shapes):
        for documents, name in product((None, documents_of(shape).to(device)), BACKENDS[device]):
            if name == "flash" and documents is not None:
                continue  # its kernel takes no mask
            try:
                cells = measure(attention_backend(name), shape, documents, device, dtype, repeats)
            except torch.OutOfMemoryError:
                cells = "– | out of memory | –"
            seen = "whole row" if documents is None else "documents"
            precision = str(dtype).removeprefix("torch.")
            rows.append(f"| {shape} | {precision} | {seen} | {name} | {cells} |")
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="one small shape; with --output")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.small and not options.output:
        parser.error("--small needs --output: it is no result to keep beside the others")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cores()} cores ({platform.machine()})"
    heading = [
        "# Attention back ends",
        "",
        f"`python -m benchmarks.attention --repeats {options.repeats}`: medians on {name}, "
        f"torch {torch.__version__}. The last column is peak memory above queries, keys, values and their "
        "gradients." + LACKS[device],
        "",
        "| shape | dtype | attends to | back end | mask, ms | forward + backward, ms | MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    shapes = [SMALL] if options.small else SHAPES[device]
    text = "\n".join([*heading, *table(device, shapes, options.repeats)]) + "\n"
    file = "cpu" if device == "cpu" else name.lower().replace(" ", "_")
    output = options.output or RESULTS / f"attention_{file}.md"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
