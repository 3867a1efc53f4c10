"""How fast text is generated beside transformers' generate: prompts and tokens, in one run by turns.

    python -m benchmarks.generation [--shapes 125M 1B] [--batches 1 8] [--dtype bfloat16] [--threads 2]
                                    [--prompt 64] [--new 32] [--long 512] [--repeats 3] [--compile]
                                    [--output benchmarks/results/generation.md]

Both generate greedily from the same random weights and prompts, with their caches, on the CPU or the CUDA
device where there is one. Each repeat times, for each of the two by turns, a generation of one token after a
long prompt, then one token and all after a short one: what the rest of the tokens take is decoding. With
--compile the step of a token is compiled, of both, transformers' with its static cache, and prompts, which
are not, have no time. Rates count all rows of a batch. Beside them is the share of the speed at which this
machine reads memory that decoding one row reaches, counting each matrix once a token.

In fp32 the tokens of both are compared first: the command fails where one differs. In bfloat16 rounding may
change which of two close candidates is taken, and then all that comes after: the table says how many of the
tokens are the same. Lines of an output that are not measured again stay: shapes can be measured one by one.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from tests.models.test_transformers import theirs
from toolkit.generation.compiled import compiler_for
from toolkit.generation.cpu_prepack import can_prepack, prepack_model
from toolkit.generation.generator import Generator
from toolkit.hardware import cores
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention_choice import choose_attention
from toolkit.models.common.decoder import Decoder
from toolkit.models.parameters import parameter_shapes
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
Prompts = list[list[int]]
Make = Callable[[Prompts, int], Prompts]
"""The tokens, so many, after each of some prompts."""
COMPARED = 16
"""New tokens of the comparison in fp32."""


def model_of(args: ModelArgs, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Random weights; norms of one. Attention is that of a model that is loaded."""
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = Decoder(args, attention=choose_attention("auto", "", device=device.type, documents=False))
    model.to(dtype).to_empty(device="cpu").requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.02, generator=generator)
    return model.to(device)


def our_maker(args: ModelArgs, dtype: torch.dtype, device: torch.device, compiled: bool) -> Make:
    model = model_of(args, dtype, device)
    if can_prepack(model) and not compiled:
        prepack_model(model)
    generator = Generator(model, compiler=compiler_for(device, constant=True) if compiled else None)
    return lambda prompts, count: generator.generate(prompts, max_new_tokens=count)


def their_maker(args: ModelArgs, dtype: torch.dtype, device: torch.device, compiled: bool) -> Make:
    reference = theirs(model_of(args, dtype, torch.device("cpu"))).to(dtype).to(device).eval()
    reference.set_attn_implementation("sdpa")
    reference.generation_config.eos_token_id = None
    reference.generation_config.pad_token_id = 0
    options: dict[str, Any] = {}
    if compiled:
        from transformers import CompileConfig

        options = {
            "cache_implementation": "static",
            "compile_config": CompileConfig(mode="default", dynamic=False),
        }
        options["compile_config"]._compile_all_devices = True  # else on accelerators alone

    @torch.inference_mode()
    def transformers(prompts: Prompts, count: int) -> Prompts:
        ids = torch.tensor(prompts, device=device)
        whole = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options
        )
        return whole[:, ids.shape[1] :].tolist()

    return transformers


def prompts_of(args: ModelArgs, rows: int, length: int) -> Prompts:
    return torch.randint(args.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1)).tolist()


def compare(shape: str, device: torch.device, batches: list[int], length: int, compiled: bool) -> None:
    """Let both make tokens in fp32, one model after the other.

    Raises:
        AssertionError: a token differs.
    """
    texts = []
    for maker in (our_maker, their_maker):
        do = maker(SHAPES[shape], torch.float32, device, compiled)
        texts.append([do(prompts_of(SHAPES[shape], rows, length), COMPARED) for rows in batches])
        del do
        forget()
    for rows, ours, transformers in zip(batches, *texts, strict=True):
        assert ours == transformers, f"{shape}, {rows} rows: texts differ"


def forget() -> None:
    """Free the models that are used no more, those in compiled code too."""
    torch.compiler.reset()
    gc.collect()


def seconds(do: Make, prompts: Prompts, count: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    do(prompts, count)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    both: list[Make], short: Prompts, long: Prompts | None, new: int, repeats: int
) -> list[tuple[list[float], list[float]]]:
    """Seconds of a long prompt, where there is one, and of a decoding step, of each repeat, of each of the
    two."""
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in both]
    for do in both:
        do(short, new)  # compiles where that is asked for
    for _ in range(repeats):
        for do, (firsts, steps) in zip(both, found, strict=True):
            if long:
                firsts.append(seconds(do, long, 1))
            first = seconds(do, short, 1)
            steps.append((seconds(do, short, new) - first) / (new - 1))
    return found


def same_tokens(both: list[Make], prompts: Prompts, new: int) -> float:
    """The share of the tokens that both make, of all."""
    ours, theirs = (do(prompts, new) for do in both)
    pairs = [pair for rows in zip(ours, theirs, strict=True) for pair in zip(*rows, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def read_speed(device: torch.device) -> float:
    """Bytes a second of the fastest of some sums over a GiB."""
    numbers = torch.ones(1 << 28, device=device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum().item()
        times.append(time.perf_counter() - start)
    return numbers.nbytes / min(times)


def read_bytes(args: ModelArgs, dtype: torch.dtype) -> int:
    """Bytes of the matrices that a token is multiplied by: of embeddings one that is tied to the head."""
    shapes = parameter_shapes(args)
    if not args.tie_embeddings:
        del shapes["tok_embeddings.weight"]
    return dtype.itemsize * sum(torch.Size(shape).numel() for shape in shapes.values())


def line(key: str, rows: int, found: list[tuple[list[float], list[float]]], share: str, same: float) -> str:
    cells = [key]
    rates = []
    for _, steps in found:
        low, middle, high = (rows / t for t in (max(steps), statistics.median(steps), min(steps)))
        rates.append(middle)
        cells.append(f"{middle:,.1f} ({low:,.1f} to {high:,.1f})")
    cells += [f"{rates[0] / rates[1]:.2f}", share]
    waits = [statistics.median(firsts) for firsts, _ in found if firsts]
    prompt = [*(f"{1000 * wait:,.0f}" for wait in waits), f"{waits[1] / waits[0]:.2f}"] if waits else [""] * 3
    cells += [*prompt, f"{same:.0%}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=summary)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS", help="of decoding")
    parser.add_argument("--new", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--long", type=int, default=512, metavar="TOKENS", help="of a prompt that is timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="the step of a token, of both")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    import transformers

    head = [
        "# Generation beside transformers",
        "",
        f"Prompts of {options.prompt} tokens and {options.new} new ones for rates, of {options.long} tokens "
        "for what a prompt takes until its first token; greedy; medians of "
        f"{options.repeats} repeats by turns, with the slowest and the fastest. transformers "
        f"{transformers.__version__} (sdpa, its dynamic cache; compiled, its static one: the step of a token "
        f"of both, and no prompt). In fp32 the first {COMPARED} tokens of both were the same in every row of "
        "every case; how many of this table's were is in its last column. The share is of the speed at which "
        "the machine reads memory, told below, that matrices are read with.",
        "",
        "| shape, dtype, rows | ours, tokens/s | transformers, tokens/s | ratio | share | prompt, ms "
        "| theirs, ms | ratio | same |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    command = f"`python -m benchmarks.generation --threads {options.threads}`, and again with `--compile`,"
    told, speed = describe(device.type), read_speed(device)
    lines: dict[str, str] = _before(options.output, head)
    for shape in options.shapes:
        compare(shape, device, options.batches, options.prompt, options.compile)
        args = SHAPES[shape]
        both = [maker(args, dtype, device, options.compile) for maker in (our_maker, their_maker)]
        for rows in options.batches:
            short, long = (prompts_of(args, rows, length) for length in (options.prompt, options.long))
            found = measure(both, short, None if options.compile else long, options.new, options.repeats)
            key = f"{shape}, {options.dtype}, {rows}{', compiled' if options.compile else ''}"
            step, speed = statistics.median(found[0][1]), max(speed, read_speed(device))
            share = f"{read_bytes(args, dtype) / step / speed:.0%}" if rows == 1 else ""
            lines[key] = line(key, rows, found, share, same_tokens(both, short, options.new))
            print(lines[key], flush=True)
        key = f"- {shape}, {options.dtype}:"
        lines[key] = f"{key} {told} {options.threads} threads, which read {speed / 1e9:.1f} GB/s."
        del both
        forget()
    if options.output:
        rows_of, machines = ([line for line in lines.values() if line[0] == mark] for mark in "|-")
        text = [*head, *rows_of, "", *machines, "", f"{command} regenerate it.", ""]
        options.output.write_text("\n".join(text))


def _before(output: Path | None, head: list[str]) -> dict[str, str]:
    """The lines of cases and machines that were measured before in this way, by what they begin with."""
    if output is None or not output.exists() or not output.read_text().startswith("\n".join(head)):
        return {}
    found = {}
    for line in output.read_text().removeprefix("\n".join(head)).splitlines():
        if line.startswith("|"):
            found[line.split("|")[1].strip()] = line
        elif line.startswith("-"):
            found[line.partition(":")[0] + ":"] = line
    return found


if __name__ == "__main__":
    main()
