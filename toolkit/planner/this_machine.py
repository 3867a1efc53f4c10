"""The rates of this computer's cores, measured on the spot: about a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.cpu import cores, keep_freed_memory
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention import attention_backend
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.rms_norm import rms_norm
from toolkit.planner.machines import Machine

_WINDOWS = 3
_WINDOW = 0.03
"""Seconds."""
_MANY = 4
_UPDATED = 1 << 22
_HEAD = 64
_SENT = 1 << 19
"""Bytes of a part of a gather."""
_BETWEEN = 384
"""Rows and columns of the factors of a product between."""
_WORK = 0.008
"""Seconds of work between two meetings, as there are in a step."""
_MEETINGS = 30


def this_machine(
    args: ModelArgs, *, tokens: int, seq_len: int, dtype: torch.dtype, attention: str, tp: int = 1
) -> Machine:
    """Measure products, attention, norms and simple operations of the sizes of a model's micro-batch, of
    ``tokens`` a rank. Where there is a process group all of its ranks call, and are measured at the same
    time; then sending is measured too."""
    keep_freed_memory()  # as the run does
    dim, width = args.dim, args.ffn_dim // tp
    heads, kv_heads = max(1, args.n_heads // tp), max(1, args.n_kv_heads // tp)
    queries, keys = heads * args.head_dim, kv_heads * args.head_dim
    shapes = [
        (dim, queries),
        (dim, keys),
        (dim, keys),
        (queries, dim),
        (dim, width),
        (dim, width),
        (width, dim),
    ]
    factors = [
        tuple(torch.randn(*it, dtype=dtype) for it in ((tokens, i), (o, i), (tokens, o))) for i, o in shapes
    ]

    def products() -> None:
        for x, w, y in factors:
            F.linear(x, w)
            torch.mm(y, w)
            torch.mm(y.t(), x)

    matmul = 6 * tokens * sum(i * o for i, o in shapes) / _seconds(products)
    y = factors[-2][2]
    rows, length = max(1, tokens // seq_len), min(tokens, seq_len)
    q, k, v = (
        torch.randn(rows, length, count, args.head_dim, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    backend = attention_backend(attention, args.sliding_window)
    mask = backend.mask(None, rows, length, torch.device("cpu"))

    def attend() -> None:
        backend(q, k, v, mask).sum().backward()

    attended = 7 * rows * heads * args.head_dim * length**2 / _seconds(attend)
    many = [torch.randn_like(y) for _ in range(_MANY)]  # more than caches hold, as the tensors of a step

    def simple() -> None:
        for each in many:
            F.silu(each) * y
            each.view(tokens, -1, 2 if width % _HEAD else _HEAD).transpose(0, 1).contiguous()

    moved = 7 * _MANY * y.nbytes / _seconds(simple)
    weight = torch.ones(dim, dtype=dtype, requires_grad=True)
    hidden = [torch.randn(tokens, dim, dtype=dtype, requires_grad=True) for _ in range(_MANY)]
    gradient = torch.ones(tokens, dim, dtype=dtype)

    def norms() -> None:
        for each in hidden:
            rms_norm(each, weight, args.norm_eps).backward(gradient)
            each.grad = None

    normed = 5 * _MANY * gradient.nbytes / _seconds(norms)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    link, latency = _sending() if ranks > 1 else (1e12, 0.0)
    name = str(dtype).removeprefix("torch.")
    return Machine(
        name="this computer",
        memory=0.0,
        peak={"float32": matmul, name: matmul},
        matmul=1.0,
        attention=attended / matmul,
        bandwidth=moved,
        node=1 << 30,
        link=link,
        network=link,
        link_latency=latency,
        network_latency=latency,
        launch=_launch(args),
        asynchronous=False,
        overlaps=False,
        update_bandwidth=_parameters(dtype),
        norm_bandwidth=normed,
        sharing=max(1.0, ranks * torch.get_num_threads() / cores()),
        gloo=True,
    )


def _seconds(run: Callable[[], object]) -> float:
    """The mean time of ``run`` in the shortest of some windows, the longest of all ranks': where ranks share
    cores, a window is long enough for each to wait for the others."""
    run()
    best = float("inf")
    for _ in range(_WINDOWS):
        if dist.is_initialized():
            dist.barrier()
        started, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - started) < _WINDOW or count == 0:
            run()
            count += 1
        best = min(best, spent / count)
    return _longest(best)


def _alike(run: Callable[[], object], count: int) -> float:
    """The mean time of ``run``, in which ranks meet, so that all run it ``count`` times."""
    run()
    best = float("inf")
    for _ in range(_WINDOWS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(count):
            run()
        best = min(best, (time.perf_counter() - started) / count)
    return _longest(best)


def _longest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


class _Calls(TorchDispatchMode):
    """Counts operations that are no views."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def _launch(args: ModelArgs) -> float:
    """Seconds of an operation on numbers so few that only its call takes time, in a model's forward and
    backward."""
    few: Any = {"dim": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "ffn_dim": 16, "vocab_size": 16}
    model = Decoder(replace(args, n_layers=4, **few))
    tokens = torch.zeros(1, 8, dtype=torch.int64)

    def step() -> None:
        model(tokens, labels=tokens).backward()

    with _Calls() as calls:
        step()
    return _seconds(step) / calls.count


def _parameters(dtype: torch.dtype) -> float:
    """Bytes a second of the update of parameters, and of making ``dtype`` of them."""
    parameter = torch.zeros(_UPDATED, requires_grad=True)
    parameter.grad = torch.ones(_UPDATED)
    update = torch.optim.AdamW([parameter], fused=True).step

    def run() -> None:
        update()
        torch.cat([parameter.detach().to(dtype, copy=True)])

    return (28 + 4 + 3 * dtype.itemsize) * _UPDATED / _seconds(run)


def _sending() -> tuple[float, float]:
    """Bytes a second that a rank sends in a ring, and the seconds of a hop, between products, after which
    ranks are not quite at the same time there and their caches hold something else. The more work between,
    the longer they wait: the longer of a hop between short and long work counts."""
    size = dist.get_world_size()
    few, part, factor = torch.zeros(size), torch.zeros(_SENT // 4), torch.ones(_BETWEEN, _BETWEEN)
    operations: Any = torch.ops._c10d_functional  # as tensor parallelism gathers
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def gather() -> None:
        torch.mm(factor, factor)
        operations.wait_tensor(operations.all_gather_into_tensor(part, size, name))

    def meet() -> None:
        torch.mm(factor, factor)
        dist.all_reduce(few)

    alone = _alike(lambda: torch.mm(factor, factor), 20)
    hop = max(_alike(meet, 20) - alone, 1e-6) / (2 * (size - 1))
    taken = max(_alike(gather, 20) - alone, 1e-6) / (size - 1)
    waited, products = 0.0, max(1, round(_WORK / alone))
    for _ in range(_MEETINGS):
        for _ in range(products):
            torch.mm(factor, factor)
        began = time.perf_counter()
        dist.all_reduce(few)
        waited += time.perf_counter() - began
    apart = -_longest(-waited) / _MEETINGS / (2 * (size - 1))  # the rank that waits least is the slowest
    return _SENT / max(taken - hop, taken / 10), max(hop, apart)
