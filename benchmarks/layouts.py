"""Published layouts beside this toolkit's forecast: MFU and tokens/s by the rates of machines.toml, and the
memory of the fullest rank by a fake step.

    python -m benchmarks.layouts [--output benchmarks/results/layouts.md] [ROW ...]

One process without a GPU takes the place of all ranks. No rate is fitted to a row: those of a kind of GPU are
the same in all of its rows. What a publication does not say is assumed, and said in the row.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.machine import describe
from toolkit.config import load_config
from toolkit.models.from_config import model_args
from toolkit.parallel.dims import degrees
from toolkit.planner.allocations import StepMemory
from toolkit.planner.fake_step import step_memory
from toolkit.planner.machines import find_machine
from toolkit.planner.time import StepTime, step_time

GIB = 2**30


@dataclass(frozen=True)
class Layout:
    """A published run: ``flags`` of this toolkit that are the same, on ``ranks`` GPUs.

    Attributes:
        tokens: published tokens a second and GPU, or None where there is an MFU alone.
        mfu: published, 0 to 1; with ``causal`` attention is counted as it is seen.
        why: the reason of the distance, and what was assumed.
        network: bytes a second to other machines, where it is not the kind's.
    """

    name: str
    source: str
    gpu: str
    ranks: int
    flags: str
    why: str
    tokens: float | None = None
    mfu: float | None = None
    causal: bool = False
    network: float | None = None


def _mesh(tp: int = 1, pp: int = 1, cp: int = 1, layers: int = 0) -> str:
    flags = ""
    if tp > 1:
        flags += f" --parallelism.tensor_parallel_degree {tp}"
    if cp > 1:
        flags += f" --parallelism.context_parallel_degree {cp}"
    if pp > 1:
        flags += f" --parallelism.pipeline_parallel_degree {pp}"
    if layers:
        flags += " --parallelism.pipeline_parallel_schedule Interleaved1F1B"
        flags += f" --parallelism.pipeline_parallel_layers_per_stage {layers}"
    return flags


def _batch(total: int, local: int = 1, length: int = 8192) -> str:
    return (
        f" --training.global_batch_size {total} --training.local_batch_size {local}"
        f" --training.seq_len {length}"
    )


_KEEP = " --activation_checkpoint.mode none"
_OP = " --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option op"
_COMPILE = " --compile.enable"
_FLOAT8 = " --model.converters float8"
_ASYNC = " --parallelism.enable_async_tensor_parallel"
_FOURS = " --parallelism.pipeline_parallel_microbatch_size 4"
_LLAMA3 = "arXiv:2407.21783, table 4"
_TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_EVEN = (
    " --parallelism.pipeline_parallel_first_stage_less_layers 0"
    " --parallelism.pipeline_parallel_last_stage_less_layers 0"
)

_PAPER = (
    "The paper names no compiler: eager here. One block a stage, as its first and last stage have one less. "
    "Its count of attention is not said; only what is seen fits its third row."
)
_FITS = "As the row above, but chosen operators are computed again, which keeps less than a third."
_SLOWER = "Its H100 have 500 W in place of 700, 2.4 TB/s in place of 3.35 and 96 GB."
LAYOUTS = [
    Layout(
        "Llama 3 405B, TP 8, PP 16, DP 64",
        _LLAMA3,
        "h100",
        8192,
        "llama3_405b" + _mesh(8, 16, layers=1) + _batch(2048) + _KEEP,
        _PAPER,
        mfu=0.43,
        causal=True,
    ),
    Layout(
        "the same, operators checkpointed",
        _LLAMA3,
        "h100",
        8192,
        "llama3_405b" + _mesh(8, 16, layers=1) + _batch(2048) + _OP,
        _FITS,
        mfu=0.43,
        causal=True,
    ),
    Layout(
        "Llama 3 405B, TP 8, PP 16, DP 128",
        _LLAMA3,
        "h100",
        16384,
        "llama3_405b" + _mesh(8, 16, layers=1) + _batch(2048) + _KEEP,
        _PAPER,
        mfu=0.41,
        causal=True,
    ),
    Layout(
        "the same, operators checkpointed",
        _LLAMA3,
        "h100",
        16384,
        "llama3_405b" + _mesh(8, 16, layers=1) + _batch(2048) + _OP,
        _FITS,
        mfu=0.41,
        causal=True,
    ),
    Layout(
        "Llama 3 405B, TP 8, CP 16, PP 16, DP 8, 131,072 tokens",
        _LLAMA3,
        "h100",
        16384,
        "llama3_405b" + _mesh(8, 16, 16, layers=1) + _batch(128, length=131072) + _KEEP,
        _PAPER,
        mfu=0.38,
        causal=True,
    ),
    Layout(
        "the same, operators checkpointed",
        _LLAMA3,
        "h100",
        16384,
        "llama3_405b" + _mesh(8, 16, 16, layers=1) + _batch(128, length=131072) + _OP,
        _FITS,
        mfu=0.38,
        causal=True,
    ),
    Layout(
        "405B, TP 8, PP 8, FSDP 8, 1F1B, float8, async TP",
        _TITAN,
        "h100",
        512,
        "llama3_405b" + _mesh(8, 8) + _batch(256, 32) + _COMPILE + _FLOAT8 + _ASYNC + _FOURS,
        f"{_SLOWER} Eight micro-batches of 4, its default then.",
        tokens=100,
    ),
    Layout(
        "405B, TP 8, PP 8, FSDP 8, Interleaved1F1B, float8, async TP",
        _TITAN,
        "h100",
        512,
        "llama3_405b" + _mesh(8, 8, layers=8) + _batch(256, 32) + _COMPILE + _FLOAT8 + _ASYNC + _FOURS,
        f"{_SLOWER} Eight micro-batches of 4, its default then.",
        tokens=128,
    ),
    Layout(
        "70B, FSDP",
        "MaxText",
        "h100",
        128,
        "llama3_70b" + _batch(512, 4) + _COMPILE,
        "Assumed: 4 rows of 8,192 a GPU, all computed again.",
        tokens=1053,
        mfu=0.512,
    ),
    Layout(
        "70B, FSDP",
        "MaxText",
        "h100",
        2048,
        "llama3_70b" + _batch(8192, 4) + _COMPILE,
        "As above. No jitter of 2,048 GPUs is forecast.",
        tokens=1031,
        mfu=0.501,
    ),
    Layout(
        "70B, TP 4, PP 4, CP 2",
        "NeMo 25.04",
        "h100",
        64,
        "llama3_70b" + _mesh(4, 4, 2, layers=4) + _EVEN + _batch(128) + _KEEP + _COMPILE,
        "Assumed: 128 samples, 5 stages a rank, nothing computed again.",
        tokens=1118,
        mfu=0.543,
    ),
    Layout(
        "8B, CP 2, 32 micro-batches",
        "NeMo 25.04",
        "h100",
        8,
        "llama3_8b" + _mesh(cp=2) + _batch(128) + _KEEP + _COMPILE,
        "",
        tokens=10682,
        mfu=0.625,
    ),
    Layout(
        "8B, FSDP, eager",
        _TITAN,
        "h100",
        8,
        "llama3_8b" + _batch(16, 2) + _OP,
        _SLOWER,
        tokens=5762,
        mfu=0.337,
    ),
    Layout(
        "8B, FSDP, compiled",
        _TITAN,
        "h100",
        8,
        "llama3_8b" + _batch(16, 2) + _OP + _COMPILE,
        _SLOWER,
        tokens=6667,
        mfu=0.39,
    ),
    Layout(
        "8B, FSDP, compiled, float8",
        _TITAN,
        "h100",
        8,
        "llama3_8b" + _batch(16, 2) + _OP + _COMPILE + _FLOAT8,
        _SLOWER,
        tokens=8532,
    ),
    Layout(
        "8B, FSDP, compiled, float8",
        "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
        "h200",
        32,
        "llama3_8b" + _batch(64, 2) + _OP + _COMPILE + _FLOAT8,
        "Weights are gathered in bf16 here, there in 8 bits.",
        tokens=10938,
    ),
    Layout(
        "8B on one GPU, 4,096 tokens, eager",
        "KempnerForge",
        "h200",
        1,
        "llama3_8b" + _batch(4, 4, 4096),
        "All computed again, as it says, it would hold 760 TFLOP/s, more than an H200 does; parameters and "
        "moments are in bf16 there.",
        tokens=10471,
        mfu=0.578,
    ),
    Layout(
        "Llama 2 70B on 2 nodes of 8 A100, 2,048 tokens",
        "huggingface.co/blog/ram-efficient-pytorch-fsdp",
        "a100-80",
        16,
        "llama2_70b" + _batch(16, 1, 2048) + " --activation_checkpoint.mode full",
        "500 steps of one row a GPU took 13.5 hours, 97 s each, with loading, validation every 100 steps and "
        "two saves of model and optimizer in them; what a step alone took is not published. Its network, "
        "Elastic Fabric Adapter, is taken at 400 Gb/s a machine.",
        tokens=21,
        network=6.25e9,
    ),
]


def forecast(layout: Layout) -> StepTime:
    config, args, mesh = _planned(layout)
    machine = find_machine(layout.gpu)
    if layout.network:
        machine = replace(machine, network=layout.network)
    return step_time(config, args, mesh, machine, param_dtype=torch.bfloat16)


def memory(layout: Layout) -> StepMemory:
    """The memory of rank 0, whose stages have the most micro-batches in flight."""
    config, args, mesh = _planned(layout)
    return step_memory(config, args, mesh, 0, param_dtype=torch.bfloat16, target="cuda")


def _planned(layout: Layout):  # type: ignore[no-untyped-def]
    file, *flags = layout.flags.split()
    config = load_config(["--job.config_file", f"train_configs/{file}.toml", *flags])
    mesh = degrees(config.parallelism, layout.ranks)
    assert mesh, f"{layout.name}: the degrees do not give {layout.ranks} ranks"
    return config, model_args(config, tokenizer_vocab=None), mesh


def row(number: int) -> str:
    """A layout as a line of the table."""
    layout = LAYOUTS[number]
    started = time.process_time()
    ours, peak = forecast(layout), memory(layout).peak
    spent = time.process_time() - started
    config, _, _ = _planned(layout)
    float8 = "float8" in config.model.converters
    each = ours.tokens_per_second / layout.ranks
    mfu = ours.mfu_causal if layout.causal else ours.mfu
    if layout.mfu:
        distance = mfu / layout.mfu - 1
        published, said = f"{layout.mfu:.1%}", f"{mfu:.1%}"
    else:
        assert layout.tokens
        distance, published, said = each / layout.tokens - 1, "–", "–" if float8 else f"{mfu:.1%}"
    exposed = sum(ours.exposed.values()) / ours.seconds
    capacity = find_machine(layout.gpu).memory
    cells = [
        str(number), layout.name, f"{layout.ranks:,} {layout.gpu}", published, said,
        f"{layout.tokens:,.0f}" if layout.tokens else "–", f"{each:,.0f}", f"{distance:+.0%}",
        f"{exposed:.0%} / {ours.bubble / ours.seconds:.0%}",
        f"{peak / GIB:.1f} of {capacity / GIB:.0f}{'' if peak <= capacity else ': does not fit'}",
        f"{spent:.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEAD = """# Published layouts

`python -m benchmarks.layouts`, on {machine}

The rates are those of `toolkit/planner/machines.toml`, the same in all rows of a kind of GPU: nothing is
fitted to a row. MFU and tokens/s are a GPU's; the distance is that of MFU where it is published, else of
tokens/s. MFU of the Llama 3 paper counts attention as it is seen, that of the others over the full square.
Waits: communication that nothing runs beside, and the pipeline's bubble, as parts of the step. Memory is rank
0's peak in GiB by a fake step, without the allocator's rounding and the CUDA context. Planning is in seconds
of a core, for forecast and fake step.

"""
COLUMNS = (
    "", "layout", "GPUs", "MFU published", "ours", "tokens/s published", "ours", "distance", "waits",
    "memory", "planning",
)  # fmt: skip


def write_docs(table: Sequence[str], page: Path = Path("docs/step_time.md")) -> None:
    """Put the table between its marks in a page."""
    before, mark, after = page.read_text(encoding="utf-8").partition(
        "<!-- benchmarks/results/layouts.md -->\n"
    )
    rest = after[after.index("<!-- end -->") :]
    page.write_text(before + mark + "\n".join(table) + "\n" + rest, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/layouts.md"))
    parser.add_argument("rows", nargs="*", type=int, help="numbers of rows, to print them alone")
    asked = parser.parse_args()
    machine, lines = describe(), []
    for number in asked.rows or range(len(LAYOUTS)):
        lines.append(row(number))
        print(lines[-1], flush=True)
    if asked.rows:
        return
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    why = [f"- {number}: {it.source}. {it.why}".rstrip() for number, it in enumerate(LAYOUTS)]
    text = [*head, *lines, "", "Sources, and reasons of distances:", "", *why]
    asked.output.write_text(HEAD.format(machine=machine) + "\n".join(text) + "\n")
    write_docs([*head, *lines])


if __name__ == "__main__":
    main()
