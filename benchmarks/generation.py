"""How fast text is generated beside transformers' generate: tokens a second, in one run by turns.

    python -m benchmarks.generation [--shapes 125M 1B] [--batches 1 8] [--dtype bfloat16] [--threads 2]
                                    [--prompt 64] [--new 128] [--repeats 5]
                                    [--output benchmarks/results/generation.md]

Both generate greedily from the same random weights and prompts, with their caches, on the CPU or the CUDA
device where there is one. Each repeat times a generation of one token and of all, for each of the two by
turns; what the rest of the tokens take is decoding. Rates count all rows of a batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import describe
from tests.models.test_transformers import theirs
from toolkit.generation.cpu_prepack import can_pack, pack
from toolkit.generation.generator import Generator
from toolkit.hardware import cores
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.decoder import Decoder
from toolkit.models.registry import resolve

SHAPES = {
    "125M": resolve(
        "llama2",
        "debugmodel",
        dim=768,
        n_layers=12,
        n_heads=12,
        n_kv_heads=12,
        ffn_dim=2048,
        vocab_size=32000,
    ),
    "1B": resolve("llama3.2", "1B"),
}
Make = Callable[[int], None]
"""Generates so many tokens."""


def model_of(args: ModelArgs, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Random weights; norms of one."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Decoder(args)
    model.to(dtype).to_empty(device="cpu").requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.02, generator=generator)
    return model.to(device)


def makers(args: ModelArgs, dtype: torch.dtype, device: torch.device, rows: int, length: int) -> list[Make]:
    """Makers of text: ours, then transformers'."""
    model = model_of(args, dtype, device)
    reference = theirs(model.cpu()).to(dtype).to(device).eval()
    model.to(device)
    reference.set_attn_implementation("sdpa")
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    if can_pack(model):
        pack(model)
    generator = Generator(model)
    prompts = torch.randint(args.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
    ids = prompts.to(device)

    def ours(count: int) -> None:
        generator.generate(prompts.tolist(), max_new_tokens=count)

    @torch.inference_mode()
    def transformers(count: int) -> None:
        reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)

    return [ours, transformers]


def seconds(do: Make, count: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    do(count)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(both: list[Make], new: int, repeats: int) -> list[tuple[list[float], list[float]]]:
    """Seconds to the first token, and a decoding step, of each repeat, of each of the two."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in both]
    for do in both:
        do(2)
    for _ in range(repeats):
        for do, (firsts, steps) in zip(both, found, strict=True):
            first = seconds(do, 1)
            firsts.append(first)
            steps.append((seconds(do, new) - first) / (new - 1))
    return found


def line(shape: str, rows: int, found: list[tuple[list[float], list[float]]]) -> str:
    cells = [shape, str(rows)]
    rates = []
    for _, steps in found:
        low, middle, high = (rows / t for t in (max(steps), statistics.median(steps), min(steps)))
        rates.append(middle)
        cells.append(f"{middle:,.1f} ({low:,.1f} to {high:,.1f})")
    cells.append(f"{rates[0] / rates[1]:.2f}")
    cells += [f"{1000 * statistics.median(firsts):,.0f}" for firsts, _ in found]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=summary)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    import transformers

    lines = [
        "# Generation beside transformers",
        "",
        f"Measured on {describe(device.type)} {options.threads} threads, {options.dtype}, transformers "
        f"{transformers.__version__} (sdpa, its dynamic cache). Prompts of {options.prompt} tokens, "
        f"{options.new} new ones, greedy; medians of {options.repeats} repeats by turns, with the slowest "
        "and the fastest.",
        "",
        "| shape | rows | ours, tokens/s | transformers, tokens/s | ratio | first token, ms | theirs, ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in options.shapes:
        for rows in options.batches:
            both = makers(SHAPES[shape], getattr(torch, options.dtype), device, rows, options.prompt)
            lines.append(line(shape, rows, measure(both, options.new, options.repeats)))
            print(lines[-1], flush=True)
            del both
    lines += ["", f"`python -m benchmarks.generation --threads {options.threads}` regenerates it.", ""]
    if options.output:
        options.output.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
