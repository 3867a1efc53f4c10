"""The pieces of benchmarks/gpu_session.py that are no training runs.

    python -m benchmarks.gpu_pieces probe | exact | micro | experts | attention | generate [--small]

``--small`` is for a rehearsal on a CPU, whose numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("triton", "pydantic", "blake3", "torchdata", "torchao", "transformers", "pytest", "jinja2")


def device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def median_seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    """Seconds of device time, or of the clock on a CPU; three calls before the first do not count.

    A GPU is kept busy until the host has launched all kernels, or the launches would count."""
    times = []
    for _ in range(repeats + 3):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
    return statistics.median(times[3:])


def probe(small: bool) -> None:
    """Print versions, whose packages are imported, and the rates of a GEMM and of a copy."""
    print(sys.version.split()[0], sys.executable, "torch", torch.__version__, "cuda", torch.version.cuda)
    for line in (["nvidia-smi", "-L"], ["gcc", "--version"], ["df", "-h", "/dev/shm", "/tmp"]):
        done = subprocess.run(line, capture_output=True, text=True) if shutil.which(line[0]) else None
        print(line[0], "is not there" if done is None else done.stdout.strip().splitlines()[:3])
    for name in PACKAGES:
        try:
            print(name, version(name), end="; ")
        except PackageNotFoundError:
            print(name, "MISSING", end="; ")
    print()
    for name in ("tests", "tools", "benchmarks", "toolkit"):  # a package of the same name would hide ours
        places = list(map(str, __import__(name).__path__))
        assert all(it.startswith(str(ROOT)) for it in places), f"{name} is {places}"
    if not torch.cuda.is_available():
        assert small, "torch finds no CUDA device"
        return print("no CUDA device: a rehearsal")
    from toolkit.metrics.flops import peak_flops

    print("cuDNN", torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version())
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = median_seconds(lambda: a @ b)
    big = torch.empty(1 << 30, device="cuda", dtype=torch.uint8).random_()
    other = torch.empty_like(big)
    copied = median_seconds(lambda: other.copy_(big))
    name = torch.cuda.get_device_name()
    print(
        f"{name}: 8192³ bf16 {2 * 8192**3 / seconds / 1e12:.0f} TFLOP/s, copy "
        f"{2 * big.numel() / copied / 1e12:.2f} TB/s, peak by our table {(peak_flops(name) or 0) / 1e12:.0f}"
    )


Tables = dict[str, dict[str, Any]]
SHARDED = {"fsdp_skip_on_one_rank": False}
VARIANTS: dict[str, Tables] = {
    "plain": {},
    "full checkpointing": {"activation_checkpoint": {"mode": "full"}},
    "by operator": {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    "inputs offloaded": {"activation_checkpoint": {"mode": "full", "enable_activation_offloading": True}},
    "4 micro-batches": {"training": {"local_batch_size": 4}},
    "4, reduced once": {"training": {"local_batch_size": 4}, "parallelism": {"fsdp_sync_each_batch": False}},
    "loss in chunks": {"training": {"loss_chunk_tokens": 128}},
    "nothing fused": {"training": {"fused_parts": []}},
    "all in FSDP": {"parallelism": SHARDED},
    "NO_SHARD": {"parallelism": SHARDED | {"sharding_strategy": "NO_SHARD"}},
    "small units": {"parallelism": SHARDED | {
        "fsdp_wrap_policy": "class", "fsdp_wrap_classes": ["Attention", "FeedForward"]}},
    "prefetch 2": {"parallelism": SHARDED | {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 2}},
    "CPU offload": {"training": {"enable_cpu_offload": True}},
    "compiled": {"compile": {"enable": True}},
}  # fmt: skip
IN_BACKWARD: Tables = {"optimizer": {"early_step_in_backward": True}, "training": {"max_norm": float("inf")}}
EXPERTS: Tables = {
    "model": {"name": "qwen3_moe", "ffn_dim": None},
    "moe": {"aux_loss_coeff": 1e-2, "z_loss_coeff": 1e-3},
}
OTHERS: dict[str, tuple[str, Tables]] = {
    "step in backward": ("in backward", IN_BACKWARD),
    "experts": ("experts", EXPERTS),
    "experts, by operator": ("experts", EXPERTS | VARIANTS["by operator"]),
    "experts, compiled": ("experts", EXPERTS | VARIANTS["compiled"]),
}
"""Techniques that change what is computed: the run on the CPU that they are compared with, and tables."""
TRUTHS: dict[str, Tables] = {"plain": {}, "in backward": IN_BACKWARD, "experts": EXPERTS}
IN_A_REHEARSAL = ("plain", "all in FSDP", "step in backward", "experts")
EXACTLY = {"dtype": "float64", "mixed_precision_param": "float64", "mixed_precision_reduce": "float64"}
STEPS = 5

Step = tuple[float, float]
"""Loss and gradient norm."""


def exact(small: bool, *, truth_into: str = "") -> None:
    """Five steps of each technique in fp64 on the device, beside the same steps on the CPU, which another
    process computes meanwhile: losses and norms."""
    from toolkit.distributed import process_group

    here, folder = device(), tempfile.mkdtemp()
    process_group.start(here, timeout_seconds=120)
    if truth_into:
        truths = {name: fp64_steps(here, f"{folder}/{name}", tables) for name, tables in TRUTHS.items()}
        Path(truth_into).write_text(json.dumps(truths))
        return process_group.stop()
    command = [sys.executable, "-m", "benchmarks.gpu_pieces", "exact", "--truth", f"{folder}/truth.json"]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=environment)
    runs: dict[str, list[Step]] = {}
    wrong = []
    plans = {name: ("plain", tables) for name, tables in VARIANTS.items()} | OTHERS
    for name, (_, tables) in plans.items():
        if small and name not in IN_A_REHEARSAL:
            continue
        try:
            runs[name] = fp64_steps(here, f"{folder}/{name}".replace(" ", "_"), tables)
        except Exception as error:
            wrong.append(name)
            print(f"{name:20} FAILED {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    process_group.stop()
    assert other.wait(100) == 0, "the run on the CPU failed"
    truths = json.loads(Path(folder, "truth.json").read_text())
    for name, found in runs.items():
        truth = truths[plans[name][0]]
        pairs = [(a, b) for one, two in zip(found, truth, strict=True) for a, b in zip(one, two, strict=True)]
        worst = max(abs(a / b - 1) for a, b in pairs)
        wrong += [name] if worst > 1e-9 else []
        print(f"{name:20} {worst:.1e}", flush=True)
    print(f"{len(runs)} techniques ran, within 1e-9 of the CPU in fp64 but for: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


def fp64_steps(where: torch.device, folder: str, tables: Tables) -> list[Step]:
    """Loss and norm of the first steps of a small model on a device."""
    from tests.training import small_config
    from toolkit.data.build import open_data
    from toolkit.metrics.startup_timer import StartupTimer
    from toolkit.trainer import Trainer

    torch._dynamo.reset()
    merged: dict[str, dict[str, Any]] = {
        "model": {"attention": "sdpa", "head_dim": 16},
        "training": {"local_batch_size": 16},
    }
    for table, values in tables.items():
        merged[table] = merged.get(table, {}) | values
    merged["training"] |= EXACTLY
    config = small_config(folder, **merged)
    trainer = Trainer(config, open_data(config, progress=False), where, StartupTimer(enabled=False))
    batches, found = iter(trainer.loader), []
    for _ in range(STEPS):
        micro_batches = [next(batches) for _ in range(trainer.batch.accumulation)]
        result = trainer.train_step(micro_batches, learning_rate=1e-3)
        found.append((result.loss, result.grad_norm))
    return found


def micro(small: bool) -> None:
    """The parts of a step that are no GEMMs, operator by operator and fused: ms, and the bytes per element
    that a copy would move in that time. Shapes of an 8B block, 8,192 tokens."""
    from toolkit import fused
    from toolkit.finetune import nf4
    from toolkit.loss import linear_losses
    from toolkit.models.common.rms_norm import RMSNorm
    from toolkit.models.common.rope import rope_rotations, rotate
    from toolkit.models.common.swiglu import swiglu
    from toolkit.models.registry import resolve
    from toolkit.optim.adamw_8bit import AdamW8bit

    here = device()
    t, d, f, v = (64, 256, 256, 512) if small else (8192, 4096, 14336, 128256)
    copy = torch.empty(1 << (20 if small else 29), device=here, dtype=torch.uint8)
    rate = 2 * copy.numel() / median_seconds(copy.clone)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=here, dtype=torch.bfloat16, requires_grad=True)

    def tell(name: str, elements: int, work: Callable[[], Any]) -> None:
        for how, parts in (("eager", []), ("fused", ["adamw_8bit", "loss", "nf4", "rotary", "swiglu"])):
            fused.enable(parts)
            seconds = median_seconds(work, 5)
            bytes_each = seconds * rate / elements
            print(f"{name:32} {how} {1e3 * seconds:8.2f} ms  {bytes_each:7.1f} B per element", flush=True)

    def both(work: Callable[..., Tensor], *leaves: Tensor) -> Callable[[], object]:
        def run() -> object:
            out = work(*leaves)
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

        return run

    with here:
        norm = RMSNorm(d, eps=1e-5).to(torch.bfloat16)
    tell("RMSNorm, never fused", t * d, both(norm, new(1, t, d)))
    tell("SwiGLU", t * f, both(swiglu, new(1, t, f), new(1, t, f)))
    rotations = rope_rotations(resolve("llama3.1", "8B"), torch.arange(t, device=here), torch.bfloat16)
    tell("rotation of queries", t * d, both(lambda q: rotate(q, rotations), new(1, t, d // 128, 128)))
    rows = min(t, 2048)
    h, w = new(rows, d), new(v, d)
    labels = torch.randint(v, (rows,), device=here)
    tell("GEMMs of the head, never fused", rows * v, both(F.linear, h, w))
    tell("head and loss", rows * v, both(lambda h, w: linear_losses(h, w, labels).sum(), h, w))
    packed = nf4.quantize(torch.randn(f, d, device=here))
    tell("elements of NF4", f * d, lambda: nf4.dequantize(packed, torch.bfloat16))
    weight = torch.nn.Parameter(torch.randn(f, d, device=here))
    weight.grad = torch.randn_like(weight)
    tell("update, AdamW (torch's fused)", f * d, torch.optim.AdamW([weight], lr=1e-4, fused=True).step)
    tell("update, AdamW8bit", f * d, AdamW8bit([weight], lr=1e-4, betas=(0.9, 0.95), eps=1e-8).step)
    print("done")


def experts(small: bool) -> None:
    """A layer of experts of Qwen3 30B-A3B beside a dense one with as many active FLOPs, forward and backward
    of 8,192 tokens: ms and TFLOP/s, eagerly and compiled, with the router's choice and balanced; and its
    matmuls alone."""
    from toolkit import fused
    from toolkit.models.common.decoder import FeedForward
    from toolkit.models.common.grouped_linear import grouped_linear
    from toolkit.models.common.moe import MoE
    from toolkit.models.registry import resolve

    here, dtype = device(), torch.bfloat16
    args = resolve("qwen3_moe", "debugmodel" if small else "30B-A3B")
    assert args.moe is not None
    tokens, d = 64 if small else 8192, args.dim
    f, k, e = args.moe.ffn_dim, args.moe.top_k, args.moe.num_experts
    fused.enable(["swiglu"])
    with here:
        layers = {"dense": FeedForward(d, f * k), "experts": MoE(args), "balanced": MoE(args)}
        layers["balanced"].router.force_load_balance = True  # type: ignore[union-attr]
    for layer in layers.values():
        layer.to(dtype)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, tokens, d, device=here, dtype=dtype, requires_grad=True)
    flops = 3 * 2 * 3 * tokens * d * f * k

    def tell(name: str, seconds: float) -> None:
        print(f"{name:32} {1e3 * seconds:8.2f} ms {flops / seconds / 1e12:6.0f} TFLOP/s", flush=True)

    for name, layer in layers.items():
        leaves = [x, *layer.parameters()]
        ways = [("eager", layer), ("compiled", torch.compile(layer, fullgraph=True))]
        for way, call in ways if here.type == "cuda" else ways[:1]:

            def step(call: Any = call, leaves: list[Tensor] = leaves) -> object:
                out = call(x)
                out = getattr(out, "hidden", out)
                return torch.autograd.grad(out, leaves, torch.ones_like(out))

            tell(f"{name}, {way}", median_seconds(step, 5))
    rows = torch.randn(tokens * k, d, device=here, dtype=dtype, requires_grad=True)
    weight = torch.randn(e, f, d, device=here, dtype=dtype, requires_grad=True)
    up = torch.randn(tokens * k, f, device=here, dtype=dtype)
    ends = (torch.arange(1, e + 1, device=here) * (tokens * k // e)).int()
    whole = torch.randn(f * k, d, device=here, dtype=dtype)
    flops //= 3
    tell("one matmul of experts", median_seconds(
        lambda: torch.autograd.grad(grouped_linear(rows, weight, ends), (rows, weight), up), 5))  # fmt: skip
    if here.type == "cuda":
        bare, turned = rows.detach(), weight.detach().transpose(1, 2)
        flops //= 3
        tell("grouped_mm alone, forward", median_seconds(lambda: F.grouped_mm(bare, turned, offs=ends), 5))
        tell("the same as one dense matmul", median_seconds(lambda: bare[:tokens] @ whole.T, 5))
    print("done")


def attention(small: bool) -> None:
    """TFLOP/s of the forward, and of forward and backward, of one 8B layer at 8,192 tokens, by kernel."""
    from benchmarks.attention import Shape, documents_of
    from toolkit.models.common.attention import attention_backend

    here = device()
    shape = Shape("small", 1, 64, 4, 1, 16) if small else Shape("8B", 1, 8192, 32, 8, 128)
    q, k, v = leaves = [
        torch.randn(1, shape.length, n, shape.head_dim, device=here, dtype=torch.bfloat16, requires_grad=True)
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    grad, documents = torch.randn_like(q), documents_of(shape).to(here)
    cuda: list[tuple[str, SDPBackend | None]] = [
        ("sdpa", None), ("flash", None), ("sdpa", SDPBackend.CUDNN_ATTENTION), ("flex", None),
        ("varlen", None),
    ]  # fmt: skip
    names = cuda if here.type == "cuda" else [("sdpa", None), ("blockwise", None)]
    causal = 2 * shape.heads * shape.head_dim * shape.length**2  # FLOPs of a forward, as seen
    runs = torch.unique_consecutive(documents[0], return_counts=True)[1].double().square().sum().item()
    for given, flops in ((None, causal), (documents, causal * runs / shape.length**2)):
        for name, kernel in names:
            if given is not None and (kernel is not None or name == "flash"):
                continue
            try:
                backend = attention_backend(name)
                with sdpa_kernel(kernel) if kernel else nullcontext():
                    mask = backend.mask(given, 1, shape.length, here)
                    with torch.no_grad():
                        forward = median_seconds(lambda b=backend, m=mask: b(q, k, v, m), 5)  # type: ignore[misc]
                    whole = median_seconds(
                        lambda b=backend, m=mask: torch.autograd.grad(b(q, k, v, m), leaves, grad),  # type: ignore[misc]
                        5,
                    )
            except Exception as error:
                print(f"{name} {kernel or ''}: {type(error).__name__} {str(error)[:120]}", flush=True)
                continue
            seen = "causal" if given is None else "documents"
            rates = f"forward {flops / forward / 1e12:5.0f} both {3.5 * flops / whole / 1e12:5.0f} TFLOP/s"
            kernel_name = kernel.name if kernel else ""
            print(f"{seen:10} {name} {kernel_name:20} {rates}, {1e3 * whole:.2f} ms", flush=True)
    print("done")


def generate(small: bool) -> None:
    """Tokens per second of a 1B, eagerly and compiled, and whether the texts are the same."""
    from toolkit.generation.compiled import compiler_for
    from toolkit.generation.generator import Generator
    from toolkit.models.common.attention_choice import choose_attention
    from toolkit.models.meta_decoder import meta_decoder
    from toolkit.models.registry import resolve

    here = device()
    shape = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=512) if small else {}
    args = resolve("llama3.2", "1B", **shape)
    model = meta_decoder(args, attention=choose_attention("auto", "", device=here.type, documents=False))
    model.to(torch.bfloat16).to_empty(device=here).requires_grad_(False).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.fill_(1) if name.endswith("norm.weight") else parameter.normal_(std=0.02)
    count = 8 if small else 128
    texts: dict[str, list[list[int]]] = {}
    plans: list[tuple[str, Any]] = [("eager", None)]
    if here.type == "cuda":
        plans.append(("compiled", compiler_for(here, constant=True)))
    for name, compiler in plans:
        generator = Generator(model, compiler=compiler)
        for rows in (1, 8):
            prompts = torch.randint(args.vocab_size, (rows, 64), generator=torch.Generator().manual_seed(1))
            times = []
            for _ in range(2 if compiler is None else 3):
                begun = time.perf_counter()
                texts[f"{name} {rows}"] = generator.generate(prompts.tolist(), max_new_tokens=count)
                times.append(time.perf_counter() - begun)
            print(
                f"{name:10} {rows} rows: {rows * count / times[-1]:8,.0f} tokens/s; the first time "
                f"{times[0]:.2f} s, then {times[-1]:.2f} s",
                flush=True,
            )
    for name, text in texts.items():
        other = texts[f"eager {name.rpartition(' ')[2]}"]
        same = sum(
            a == b for one, two in zip(text, other, strict=True) for a, b in zip(one, two, strict=True)
        )
        print(f"{name}: {same} of {sum(map(len, other))} tokens as eager")
    print("done")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pieces = {it.__name__: it for it in (probe, exact, micro, experts, attention, generate)}
    parser.add_argument("what", choices=pieces)
    parser.add_argument("--small", action="store_true", help="for a rehearsal on a CPU")
    parser.add_argument("--truth", help=argparse.SUPPRESS)  # exact: write the steps on the CPU here
    options = parser.parse_args()
    if options.truth:
        exact(options.small, truth_into=options.truth)
    else:
        pieces[options.what](options.small)


if __name__ == "__main__":
    main()
