"""Tests that only a GPU can run: a run beside the same run on the CPU, what a step waits for, and the kernels
of attention."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.helpers import free_port
from tests.models.attention_cases import LENGTH, PACKED, PACKINGS, ROWS, inputs, with_gradients
from tests.models.small_llama import build, small, tokens_and_labels
from tests.training import small_config
from toolkit.config.parallelism import OPERATORS, ActivationCheckpoint, Compile
from toolkit.data.build import open_data
from toolkit.distributed import process_group
from toolkit.metrics.startup_timer import StartupTimer
from toolkit.models.common.block_output import BlockOutput
from toolkit.models.common.grouped_linear import grouped_linear
from toolkit.models.common.moe import MoE, RouterLosses
from toolkit.models.registry import resolve
from toolkit.parallel.activation_checkpoint import apply_activation_checkpoint
from toolkit.parallel.activation_offload import apply_activation_offload
from toolkit.parallel.compile import apply_compile
from toolkit.parallel.context_parallel import apply_context_parallel
from toolkit.parallel.sequence_shards import SequenceShards
from toolkit.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]


def _losses(folder: Path, cache: Path, precision: str, **environment: str) -> list[float]:
    command = [sys.executable, "-m", "toolkit.train", "--job.config_file=train_configs/debug_model.toml"]
    command += ["--training.steps=20", "--metrics.log_freq=1", "--training.dataset=embedded_validation"]
    command += ["--validation.enable=false", f"--training.mixed_precision_param={precision}"]
    command += [f"--job.dump_folder={folder}", f"--data.cache_folder={cache}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True, timeout=170)
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("precision", "relative"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_cuda_gives_the_curve_of_the_cpu(tmp_path: Path, precision: str, relative: float) -> None:
    # fp32: other kernels round otherwise, and 20 updates multiply 1e-6 by some tens. bf16 against fp32: its
    # 8 bits are 4e-3 a value, which the mean over 4,096 tokens averages and 20 updates multiply.
    cpu = _losses(tmp_path / "cpu", tmp_path / "cache", "float32", CUDA_VISIBLE_DEVICES="")
    gpu = _losses(tmp_path / "gpu", tmp_path / "cache", precision)
    assert gpu == pytest.approx(cpu, rel=relative)


def steps(folder: str, attention: str, *, ahead: bool) -> list[tuple[float, float]]:
    """Losses and norms of three steps, of which all but the first must not wait for the device. That a step
    waits for an event, which the norm's way to the host is, torch does not count."""
    config = small_config(
        folder,
        model={"attention": attention, "head_dim": 16},
        training={"max_norm": 1e-3, "local_batch_size": 4, "mixed_precision_param": "bfloat16"},
    )
    device = torch.device("cuda", 0)
    trainer = Trainer(config, open_data(config, progress=False), device, StartupTimer(enabled=False))
    assert trainer.train_step.updates_ahead, (
        "the default optimizer can be queued before its gradient is known"
    )
    trainer.train_step.updates_ahead = ahead
    batches, found = iter(trainer.loader), []
    for number in range(3):
        micro_batches = [next(batches) for _ in range(trainer.batch.accumulation)]
        torch.cuda.set_sync_debug_mode("error" if ahead and number else "default")
        result = trainer.train_step(micro_batches, learning_rate=1e-3)
        found.append((result.loss, result.grad_norm))
    torch.cuda.set_sync_debug_mode("default")
    return found


def steps_of_both(folder: str, attention: str) -> None:
    """For a process of its own, since a run has the process group to itself."""
    process_group.start(torch.device("cuda", 0), timeout_seconds=120)
    early, late = (steps(f"{folder}/{ahead}", attention, ahead=ahead) for ahead in (True, False))
    # Atomics may add bf16 in another order; the clipped gradient is one rounding off.
    for one, other in zip(early, late, strict=True):
        assert one == pytest.approx(other, rel=1e-2)
    process_group.stop()


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_a_step_waits_for_an_event_alone(tmp_path: Path, attention: str) -> None:
    code = f"from {__name__} import steps_of_both; steps_of_both({str(tmp_path)!r}, {attention!r})"
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    environment = os.environ | {name: str(value) for name, value in alone.items()}
    environment["MASTER_ADDR"] = "127.0.0.1"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=170)


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


KERNELS = [
    ("sdpa", torch.bfloat16, PACKED),
    ("sdpa", torch.bfloat16, None),
    ("sdpa", torch.float32, None),
    ("flex", torch.bfloat16, PACKED),
    ("flex", torch.bfloat16, None),
    ("flex", torch.float32, PACKED),
    ("varlen", torch.bfloat16, PACKED),
    ("varlen", torch.bfloat16, None),
    ("flash", torch.bfloat16, None),
]


# A window of one token has gradients of 0, from which nothing is a relative distance away.
CASES = [(*kernel, heads, None) for kernel in KERNELS for heads in (8, 2)] + [
    (*kernel, 2, 64) for kernel in KERNELS if kernel[0] != "flash"
]


# flex compiles each shape for some 8 s.
@pytest.mark.parametrize(
    ("name", "dtype", "documents", "kv_heads", "window", "pieces"),
    [(*case, pieces) for case in CASES for pieces in (1, 2 if case[0] == "flex" else 4)],
)
def test_attention_is_exact_to_rounding(
    name: str, dtype: torch.dtype, documents: Tensor | None, kv_heads: int, window: int | None, pieces: int
) -> None:
    # Beside fp64 on the CPU from the same rounded inputs. bf16 rounds results and, within the kernel,
    # probabilities to 2^-9: 2e-3, several times over in backward. One token too many or too few in a softmax
    # over at most 200 changes its row by 7e-2. Of fp32 only sums differ; TF32 would be 5e-4.
    qkv = inputs(8, kv_heads, dtype, head_dim=64)
    exact = with_gradients("sdpa", [x.double() for x in qkv], documents, window=window)
    on_device = None if documents is None else documents.cuda()
    found = with_gradients(name, [x.cuda() for x in qkv], on_device, pieces, window)
    for part, truth in zip(found, exact, strict=True):
        assert part.dtype == dtype
        assert _relative(part.cpu(), truth) < (1e-2 if dtype == torch.bfloat16 else 1e-4)


def _steps(
    name: str, dtype: torch.dtype, *, compiled: bool = False, mode: str = "none", split: bool = False
) -> list[list[Tensor]]:
    """Gradients for each of the packings of a model on the GPU, which compiles for the first alone. With
    ``split`` it has the first and the last piece of each sequence, as one of context-parallel ranks, the
    only one, has."""
    model = build(small(n_layers=2), dtype, attention=name).cuda()
    if split:
        apply_context_parallel(model, SequenceShards(0, 1), init_device_mesh("cuda", (1,)))
    options = {"mode": "selective", "selective_ac_option": mode} if mode in OPERATORS else {"mode": mode}
    apply_activation_checkpoint(model.layers, ActivationCheckpoint(**options))
    if compiled:
        apply_compile(model, Compile(enable=True, components=["model"]))
    tokens, labels = (x.cuda() for x in tokens_and_labels(ROWS, LENGTH))
    gradients = []
    for step, documents in enumerate(PACKINGS):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            model.zero_grad()
            model(tokens, documents=documents.cuda(), labels=labels).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


@pytest.mark.parametrize(
    ("compiled", "mode"), [(False, "none"), (False, "op"), (True, "none"), (True, "op"), (True, "matmul")]
)
@pytest.mark.parametrize(
    ("name", "dtype"), [("flex", torch.float32), ("flex", torch.bfloat16), ("varlen", torch.bfloat16)]
)
def test_models_train_alike_with_every_attention(
    name: str, dtype: torch.dtype, compiled: bool, mode: str
) -> None:
    exact = _steps("sdpa", torch.float32)
    # fp32: sums in another order, through two layers. bf16: SDPA is as far from fp32 by its own roundings,
    # which are not the same ones; what is off by a mask or a head is off by more than half.
    rounding = exact if dtype == torch.float32 else _steps("sdpa", dtype)
    for step in zip(_steps(name, dtype, compiled=compiled, mode=mode), rounding, exact, strict=True):
        for found, rounded, truth in zip(*step, strict=True):
            assert _relative(found, truth) <= 1e-4 + 2 * _relative(rounded, truth)


SIZES = {
    "uneven": (130, 64, 7, 1),
    "some empty": (0, 200, 0, 3),
    "all in one": (0, 0, 202, 0),
    "none": (0,) * 4,
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_matmuls_of_experts_are_exact_to_rounding(sizes: tuple[int, ...], compiled: bool) -> None:
    # Beside fp64 on the CPU from the same rounded inputs; bf16 rounds results alone, to 2^-9.
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), 64, generator=generator).bfloat16()
    weight = torch.randn(len(sizes), 48, 64, generator=generator).bfloat16()
    upstream = torch.randn(sum(sizes), 48, generator=generator).bfloat16()
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)

    def results(call: Callable[..., Tensor], move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [move(it).requires_grad_() for it in (x, weight)]
        out = call(*leaves, ends.to(leaves[0].device))
        return [out, *torch.autograd.grad(out, leaves, move(upstream))]

    call = torch.compile(grouped_linear, fullgraph=True) if compiled else grouped_linear
    exact = results(grouped_linear, lambda it: it.double())
    for part, truth in zip(results(call, lambda it: it.cuda()), exact, strict=True):
        assert part.dtype == torch.bfloat16
        if truth.any():
            assert _relative(part.cpu(), truth) < 4e-3
        else:
            assert not part.any()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_of_experts_is_exact_and_does_not_wait_for_the_device(compiled: bool) -> None:
    args = resolve("qwen3_moe", "debugmodel")
    layer = MoE(args)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    layer.to(torch.bfloat16)
    x = torch.randn(4, 100, args.dim, generator=generator).bfloat16()

    def results(layer: MoE, x: Tensor, call: Callable[[Tensor], BlockOutput]) -> list[Tensor]:
        layer.losses = RouterLosses(balance=0.1, z=0.01)
        x, parameters = x.requires_grad_(), list(layer.parameters())
        out = call(x)
        total = out.hidden.square().sum() + sum(out.losses.values())
        return [out.hidden, *torch.autograd.grad(total, [x, *parameters])]

    twin = copy.deepcopy(layer).double()
    for it in (layer, twin):  # or experts whose scores are equal to a rounding may be chosen differently
        it.router.force_load_balance = True
    exact = results(twin, x.double(), twin)
    layer.cuda()
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    # bf16 rounds each of three matmuls and their gradients, several times over; a row of another expert would
    # be off by about its whole norm.
    for part, truth in zip(results(layer, x.cuda(), call), exact, strict=True):
        assert _relative(part.cpu(), truth) < 3e-2
    layer.router.force_load_balance = False
    on_device = x.cuda()
    results(layer, on_device.clone(), call)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(layer, on_device, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [("sdpa", torch.bfloat16), ("flex", torch.float32), ("varlen", torch.bfloat16)]
)
def test_models_of_split_sequences_train_alike(
    name: str, dtype: torch.dtype, compiled: bool, one_rank: None
) -> None:
    # As above; the sums over keys are the same, those over queries are of two parts.
    exact = _steps("sdpa", torch.float32)
    rounding = exact if dtype == torch.float32 else _steps("sdpa", dtype)
    for step in zip(_steps(name, dtype, compiled=compiled, split=True), rounding, exact, strict=True):
        for found, rounded, truth in zip(*step, strict=True):
            assert _relative(found, truth) <= 1e-4 + 2 * _relative(rounded, truth)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("name", "ring"), [("sdpa", False), ("flash", False), ("flash", True)])
def test_split_rows_without_documents_take_the_flash_kernel(
    name: str, ring: bool, compiled: bool, one_rank: None
) -> None:
    def gradients(split: bool) -> list[Tensor]:
        model = build(small(n_layers=2), torch.bfloat16, attention=name).cuda()
        if split:
            apply_context_parallel(model, SequenceShards(0, 1), init_device_mesh("cuda", (1,)), ring=ring)
        if compiled:
            apply_compile(model, Compile(enable=True, components=["model"]))
        tokens, labels = (x.cuda() for x in tokens_and_labels(ROWS, LENGTH))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            model(tokens, labels=labels).backward()
        return [parameter.grad for parameter in model.parameters()]

    # bf16 twice, in another order of sums: a key too many or too few moves a gradient by more than half.
    for found, whole in zip(gradients(True), gradients(False), strict=True):
        assert _relative(found, whole) < 5e-2


def test_inputs_of_blocks_come_back_from_the_host_as_they_were_and_leave_room() -> None:
    """Many steps of few tokens and one of many: a copy that came too late or memory that was given away too
    early would show in a gradient."""

    def gradients(offload: bool, rows: int, length: int) -> tuple[list[Tensor], int]:
        model = build(small(n_layers=8), torch.float32).cuda()
        apply_activation_checkpoint(model.layers, ActivationCheckpoint(mode="full"))
        if offload:
            apply_activation_offload(model.layers)
        tokens, labels = (x.cuda() for x in tokens_and_labels(rows, length))
        torch.cuda.reset_peak_memory_stats()
        model(tokens, labels=labels).backward()
        return [parameter.grad for parameter in model.parameters()], torch.cuda.max_memory_allocated()

    for rows, length in [(2, 40)] * 20 + [(16, 2000)]:
        (plain, held), (offloaded, held_less) = (gradients(it, rows, length) for it in (False, True))
        for mine, other in zip(offloaded, plain, strict=True):
            assert _relative(mine, other) < 1e-5  # atomic sums have no order
    assert held_less < held
