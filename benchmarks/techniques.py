"""Effects of each technique on memory and step time, alone and in stacks, on a model of 125M parameters.

    python -m benchmarks.techniques [--only TEXT ...] [--steps N] [--small]
                                    [--output benchmarks/results/techniques_<device>.md]

A case is a training run in fresh processes. The baseline shards over all ranks (FULL_SHARD) and switches
nothing else on: fp32, no activation checkpointing, eager, all logits at once, fused AdamW. On CPU two ranks,
and four where a technique needs them; on CUDA one rank. A step is the median of those after the first,
without compiling, which is told apart. Memory is that of the rank that has most. On CUDA it is what tensors
took at most. On CPU it is the peak of resident memory, less that of a process that has only imported what it
needs, in a run of two steps of its own in which malloc gives freed memory back at once: otherwise holes in
the heap hide what a technique saves, and giving memory back costs most of a step's time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe
from benchmarks.startup import ROOT
from tests.helpers import free_port
from toolkit.hardware import cores, cpu_multiplies_bf16
from toolkit.models.parameters import parameter_count
from toolkit.models.registry import resolve

SHAPE = {"dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 4, "ffn_dim": 2048, "vocab_size": 32000}
SMALL = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 4096}
WARM_UP = 1
STEPS = {"cpu": 3, "cuda": 10}
# Blocks of a MiB and more are mapped one by one, in huge pages, since faults are what mapping costs.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "1048576", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
LIMIT_SECONDS = 900.0

BASELINE: dict[str, Any] = {
    "parallelism.sharding_strategy": "FULL_SHARD",
    "training.mixed_precision_param": "float32",
    "training.loss_chunk_tokens": 0,
    "activation_checkpoint.mode": "none",
    "metrics.log_freq": 1,
    "metrics.enable_tensorboard": "false",
    "metrics.save_for_all_ranks": "true",
}
BATCH = {
    "cpu": {"training.seq_len": 128, "training.global_batch_size": 4},
    "cuda": {"training.seq_len": 2048, "training.global_batch_size": 8},
}


@dataclass(frozen=True)
class Case:
    """A technique: what it sets, on how many ranks, over how many micro-batches; compared with ``beside``."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 0
    micro_batches: int = 1
    beside: str = "baseline"
    only: str = ""


def _parallel(**options: Any) -> dict[str, Any]:
    return {f"parallelism.{key}": value for key, value in options.items()}


def _strategy(name: str, **more: Any) -> dict[str, Any]:
    return _parallel(sharding_strategy=name, **more)


def _checkpointing(mode: str, **more: Any) -> dict[str, Any]:
    return {f"activation_checkpoint.{key}": value for key, value in {"mode": mode, **more}.items()}


COMPILE = {"compile.enable": "true"}
BF16 = {"training.mixed_precision_param": "bfloat16"}
CHUNKS = {"training.loss_chunk_tokens": 128}
EARLY = {"optimizer.early_step_in_backward": "true", "training.max_norm": "inf"}
FULL = _checkpointing("full")
BY_OPERATOR = _checkpointing("selective", selective_ac_option="op")
NO_MASK = {"data.document_mask": "false"}
FLASH = {"model.attention": "flash"}
REPLICAS = {"data_parallel_replicate_degree": 2}

CASES = [
    Case("baseline"),
    # Strategies
    Case("SHARD_GRAD_OP", _strategy("SHARD_GRAD_OP")),
    Case("NO_SHARD", _strategy("NO_SHARD")),
    Case("reshard always", _parallel(fsdp_reshard_after_forward="always")),
    Case("FULL_SHARD, 4 ranks", ranks=4),
    Case("HYBRID_SHARD, 2 x 2", _strategy("HYBRID_SHARD", **REPLICAS), 4, beside="FULL_SHARD, 4 ranks"),
    Case(
        "HYBRID_SHARD_ZERO2, 2 x 2",
        _strategy("HYBRID_SHARD_ZERO2", **REPLICAS),
        4,
        beside="FULL_SHARD, 4 ranks",
    ),
    Case("reshard over 2 of 4", _parallel(fsdp_reshard_after_forward=2), 4, beside="FULL_SHARD, 4 ranks"),
    # Units and when they are asked for
    Case(
        "wrap: Attention and FeedForward too",
        _parallel(fsdp_wrap_policy="class", fsdp_wrap_classes="TransformerBlock,Attention,FeedForward"),
    ),
    Case("wrap by size, 12M", _parallel(fsdp_wrap_policy="size", fsdp_min_num_params=12_000_000)),
    Case("prefetch 2 and 2", _parallel(fsdp_forward_prefetch=2, fsdp_backward_prefetch=2)),
    Case("CPU offload", {"training.enable_cpu_offload": "true"}, only="cuda"),
    # Accumulation
    Case("2 micro-batches", micro_batches=2),
    Case(
        "2 micro-batches, reduced once",
        _parallel(fsdp_sync_each_batch="false"),
        micro_batches=2,
        beside="2 micro-batches",
    ),
    # Memory
    Case("checkpointing: full", FULL),
    Case(
        "checkpointing: full, inputs offloaded",
        FULL | {"activation_checkpoint.enable_activation_offloading": "true"},
        beside="checkpointing: full",
        only="cuda",
    ),
    Case("checkpointing: every 2nd block", _checkpointing("selective", selective_ac_option="2")),
    Case("checkpointing: by operator", BY_OPERATOR),
    Case("loss in chunks of 128 tokens", CHUNKS),
    Case("step in backward", EARLY),
    Case("moments in 8 bits", {"optimizer.name": "AdamW8bit"}),
    # Precision
    Case("bf16 compute", BF16),
    Case("bf16 compute and reduce", BF16 | {"training.mixed_precision_reduce": "bfloat16"}),
    Case("bf16 throughout", BF16 | {"training.dtype": "bfloat16"}),
    # Compile
    Case("compile", COMPILE),
    Case("compile, loss only", COMPILE | {"compile.components": "loss"}),
    Case("compile, memory budget 0.5", COMPILE | _checkpointing("memory_budget"), beside="compile"),
    # Optimizer
    Case("foreach AdamW", {"optimizer.implementation": "foreach"}),
    Case("for-loop AdamW", {"optimizer.implementation": "for-loop"}),
    # Attention
    Case("bf16, documents not apart", BF16 | NO_MASK, beside="bf16 compute", only="cuda"),
    Case("the same, flash", BF16 | NO_MASK | FLASH, beside="bf16, documents not apart", only="cuda"),
    Case("bf16, flex", BF16 | {"model.attention": "flex"}, beside="bf16 compute", only="cuda"),
    Case("bf16, varlen", BF16 | {"model.attention": "varlen"}, beside="bf16 compute", only="cuda"),
    # Stacks
    Case("fast: bf16, compile", BF16 | COMPILE),
    Case("balanced: bf16, compile, by operator, chunks", BF16 | COMPILE | BY_OPERATOR | CHUNKS),
    Case("small: bf16, full, chunks, step in backward", BF16 | FULL | CHUNKS | EARLY),
    Case("small in fp32: full, chunks, step in backward", FULL | CHUNKS | EARLY),
]


@dataclass(frozen=True)
class Measured:
    """Bytes are GiB; ``compiling`` seconds in all steps; ``loss`` of the last step."""

    memory: float
    step: float
    compiling: float
    loss: float


class CannotRun(Exception):
    """A case that this device has no place for, or whose run failed; says why."""


def ranks_of(case: Case, device: str) -> int:
    """How many ranks a case takes here.

    Raises:
        CannotRun: not these.
    """
    if case.only and case.only != device:
        raise CannotRun(f"needs {case.only}")
    if device == "cpu":
        if "bfloat16" in case.settings.values() and not cpu_multiplies_bf16():
            raise CannotRun("needs a CPU that multiplies bf16")
        return case.ranks or 2
    if case.ranks > torch.cuda.device_count():
        raise CannotRun(f"needs {case.ranks} devices")
    return case.ranks or 1


def flags(case: Case, shape: Mapping[str, int], device: str, ranks: int, folder: Path) -> list[str]:
    """The command line of a case's training, without its length."""
    model = {f"model.{key}": value for key, value in shape.items()}
    values = model | BASELINE | BATCH[device] | dict(case.settings)
    values["training.local_batch_size"] = values["training.global_batch_size"] // (ranks * case.micro_batches)
    values["data.cache_folder"] = folder.parent / "tokens"
    values["compile.cache_folder"] = folder / "compiled"
    return [f"--{key}={value}" for key, value in values.items()]


def run(case: Case, shape: Mapping[str, int], device: str, steps: int, folder: Path) -> Measured:
    """Train in fresh processes.

    Raises:
        CannotRun: this device lacks something, or the run failed.
    """
    ranks = ranks_of(case, device)
    arguments = flags(case, shape, device, ranks, folder)
    timed = train([*arguments, f"--training.steps={steps}"], ranks, folder / "timed", {})
    sized, key = timed, "memory_gib"
    if device == "cpu":
        sized = train([*arguments, "--training.steps=2"], ranks, folder / "sized", GIVE_BACK)
        key = "memory_peak_gib"
    return Measured(
        memory=max(record[key] for records in sized for record in records),
        step=statistics.median(record["step_seconds"] for record in timed[0][WARM_UP:]),
        compiling=sum(record.get("compile_seconds", 0.0) for record in timed[0]),
        loss=timed[0][-1]["loss"],
    )


def train(
    arguments: Sequence[str], ranks: int, folder: Path, environment: Mapping[str, str]
) -> list[list[dict[str, Any]]]:
    """Train, and return each rank's log, step by step.

    Raises:
        CannotRun: the run failed.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "toolkit.train", *arguments, f"--job.dump_folder={folder}"]
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": max(1, cores() // ranks)}
    shared = os.environ | environment | {name: str(value) for name, value in world.items()}
    with (folder / "output.txt").open("w") as output:
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            raise CannotRun(f"not done after {LIMIT_SECONDS:.0f} s") from None
        finally:
            for process in processes:
                process.kill()
    if any(codes):
        raise CannotRun(_reason((folder / "output.txt").read_text()))
    names = ["metrics.jsonl", *(f"metrics.rank-{rank}.jsonl" for rank in range(1, ranks))]
    return [[json.loads(line) for line in (folder / name).read_text().splitlines()] for name in names]


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    problems = [line for line in lines if "Error" in line or line.startswith("rule")]
    return f"failed: {(problems or lines or ['no output'])[-1][:160]}"


def imports_only(device: str) -> float:
    """GiB that a process has before it makes anything; nothing of CUDA's."""
    if device == "cuda":
        return 0.0
    code = (
        "import torch; import toolkit.trainer; from toolkit.metrics.memory import memory_usage; "
        "print(memory(torch.device('cpu'))['memory_peak_gib'])"
    )
    return float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, text=True,
                                stdout=subprocess.PIPE).stdout)  # fmt: skip


def measure(
    cases: Sequence[Case], shape: Mapping[str, int], device: str, steps: int
) -> Iterator[tuple[Case, Measured | str]]:
    """Each case with its figures, or with why there are none."""
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)  # the user's own would be warm
    with tempfile.TemporaryDirectory() as temporary:
        for number, case in enumerate(cases):
            try:
                yield case, run(case, shape, device, steps, Path(temporary, str(number)))
            except CannotRun as reason:
                yield case, str(reason)


def header(shape: Mapping[str, int], device: str, imports: float, steps: int) -> list[str]:
    """All above the rows."""
    parameters = parameter_count(resolve("llama3", "debugmodel", **shape))
    batch = BATCH[device]
    samples, length = batch["training.global_batch_size"], batch["training.seq_len"]
    apart = f" Imports take {imports:.2f} GiB of each process, which are not counted." if imports else ""
    return [
        f"# Techniques on {device.upper()}",
        "",
        f"`python -m benchmarks.techniques --output benchmarks/results/techniques_{device}.md`: a Llama of "
        f"{parameters:,} parameters, {samples} samples of {length:,} tokens a step, {steps} steps; the "
        f"script says what the baseline is and how it is measured. {describe(device)}{apart}",
        "",
        "In brackets, the change from the baseline, or from the case that the last column names.",
        "",
        "| | ranks | peak GiB of a rank | seconds a step | compiling, s | loss at the end | beside |",
        "|---|---|---|---|---|---|---|",
    ]


def row(case: Case, got: Measured | str, others: Mapping[str, Measured], device: str, imports: float) -> str:
    """A line of the table, with the case that it is compared with if that was measured."""
    if isinstance(got, str):
        return f"| {case.name} | | {got} | | | | |"
    base = others.get(case.beside)
    peak, step = f"{got.memory - imports:.2f}", f"{got.step:.2f}"
    if base and base is not got:
        peak += f" ({(got.memory - imports) / (base.memory - imports) - 1:+.0%})"
        step += f" ({got.step / base.step - 1:+.0%})"
    compiling = f"{got.compiling:.0f}" if got.compiling else ""
    beside = case.beside if case.beside != "baseline" else ""
    ranks = ranks_of(case, device)
    return f"| {case.name} | {ranks} | {peak} | {step} | {compiling} | {got.loss:.4f} | {beside} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", help="only the cases whose names hold one of these, e.g. bf16")
    parser.add_argument("--steps", type=int, help=f"of each case; more than {WARM_UP}")
    parser.add_argument("--small", action="store_true", help="a model of no size, to see that a case runs")
    parser.add_argument("--output", type=Path, help="Markdown file to write; default: print only")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = options.steps or STEPS[device]
    if steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, which is not timed")
    cases = [case for case in CASES if not options.only or any(text in case.name for text in options.only)]
    imports, shape = imports_only(device), SMALL if options.small else SHAPE
    lines, measured = header(shape, device, imports, steps), dict[str, Measured]()
    print("\n".join(lines), flush=True)
    for case, got in measure(cases, shape, device, steps):
        if isinstance(got, Measured):
            measured[case.name] = got
        lines.append(row(case, got, measured, device, imports))
        print(lines[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
