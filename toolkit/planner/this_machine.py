"""The rates of this computer's cores, measured on the spot: about a second."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.flop_counter import flop_registry

from toolkit.compat import TorchDispatchMode, chunk_cat, functional_collectives, tree_iter
from toolkit.config.parallelism import Parallelism
from toolkit.cpu import cores, keep_freed_memory
from toolkit.loss import linear_losses
from toolkit.models.common.args import ModelArgs
from toolkit.models.common.attention import attention_backend
from toolkit.models.common.decoder import Decoder
from toolkit.models.common.rms_norm import rms_norm
from toolkit.models.common.rope import rope_rotations, rotate
from toolkit.models.parameters import parameter_count
from toolkit.optim.grad_clip import norms
from toolkit.optim.update_ahead import update_ahead
from toolkit.parallel.fsdp import apply_fsdp
from toolkit.planner.machines import Machine

_WINDOWS = 3
_WINDOW = 0.03
"""Seconds."""
_UNCACHED = 1 << 26
"""Bytes that what is measured goes over before it comes to the same again, as a step does."""
_NUMBERS = 1 << 25
"""The most parameters that are copied and updated."""
_SIDE, _MATRICES = 1 << 9, 6
"""The side of a matrix of them, and the matrices of a unit."""
_LOGITS, _NARROW = 1 << 22, 16
"""Logits, and the width of what they are made of, whose products count for nothing."""
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
    """Measure what a step does with the sizes of a model's micro-batch, of ``tokens`` a rank: products,
    attention, norms, the head's loss, simple operations, copies of parameters and their update. As in a step,
    what is made is kept until its backward, so that little of it is in a cache when it is needed. Where there
    is a process group all of its ranks call, and are measured at the same time; then sending is measured too.
    """
    keep_freed_memory()  # as the run does
    peak = _products(args, tokens, dtype, tp)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    link, latency = _sending() if ranks > 1 else (1e12, 0.0)
    launch, unit_launch = _launches(args)
    numbers = min(_NUMBERS, parameter_count(args) // ranks)
    name = str(dtype).removeprefix("torch.")
    return Machine(
        name="this computer",
        memory=0.0,
        peak={"float32": peak, name: peak},
        matmul=1.0,
        attention=_attention(args, tokens, seq_len, dtype, attention, tp) / peak,
        bandwidth=_simple(args, tokens, dtype, tp),
        node=1 << 30,
        link=link,
        network=link,
        link_latency=latency,
        network_latency=latency,
        launch=launch,
        unit_launch=unit_launch,
        asynchronous=False,
        overlaps=False,
        update_bandwidth=_update(numbers),
        copy_bandwidth=_copies(numbers, dtype),
        norm_bandwidth=_norms(args, tokens, dtype),
        loss_bandwidth=_loss(args.vocab_size // tp, dtype),
        sharing=max(1.0, ranks * torch.get_num_threads() / cores()),
        gloo=True,
    )


def _products(args: ModelArgs, tokens: int, dtype: torch.dtype, tp: int) -> float:
    """FLOP/s of the products of blocks."""
    dim, width = args.dim, args.ffn_dim // tp
    queries, keys = (max(1, count // tp) * args.head_dim for count in (args.n_heads, args.n_kv_heads))
    shapes = [(dim, queries), (dim, keys), (dim, keys), (queries, dim)]
    shapes += [(dim, width), (dim, width), (width, dim)]
    size = sum(tokens * i + o * i + tokens * o for i, o in shapes) * dtype.itemsize
    shapes *= _times(size, args)
    factors = [
        tuple(torch.randn(*it, dtype=dtype) for it in ((tokens, i), (o, i), (tokens, o))) for i, o in shapes
    ]

    def run() -> None:
        made = [F.linear(x, w) for x, w, _ in factors]
        for x, w, y in reversed(factors):
            made += [torch.mm(y, w), torch.mm(y.t(), x)]

    return 6 * tokens * sum(i * o for i, o in shapes) / _seconds(run)


def _attention(
    args: ModelArgs, tokens: int, seq_len: int, dtype: torch.dtype, attention: str, tp: int
) -> float:
    """FLOP/s of attention."""
    rows, length = max(1, tokens // seq_len), min(tokens, seq_len)
    heads, kv_heads = max(1, args.n_heads // tp), max(1, args.n_kv_heads // tp)
    times = _times(rows * length * args.head_dim * (2 * heads + 2 * kv_heads) * dtype.itemsize, args)
    given = [
        [
            torch.randn(rows, length, count, args.head_dim, dtype=dtype, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        ]
        for _ in range(times)
    ]
    gradients = [torch.randn_like(q) for q, _, _ in given]
    backend = attention_backend(attention, args.sliding_window)
    mask = backend.mask(None, rows, length, torch.device("cpu"))

    def run() -> None:
        made = [backend(q, k, v, mask) for q, k, v in given]
        while made:
            torch.autograd.grad(made.pop(), given[len(made)], gradients[len(made)])

    return 7 * times * rows * heads * args.head_dim * length**2 / _seconds(run)


def _simple(args: ModelArgs, tokens: int, dtype: torch.dtype, tp: int) -> float:
    """Bytes a second of the rotation of queries, of SwiGLU and of a sum, as their operations read and write
    them forward and backward."""
    heads, width = max(1, args.n_heads // tp), args.ffn_dim // tp
    shapes = [(1, tokens, heads, args.head_dim), (tokens, width), (tokens, width), (tokens, args.dim)]
    size = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
    given = [
        [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
        for _ in range(_times(size, args))
    ]
    gradients = [[torch.randn_like(it) for it in (q, up, x)] for q, _, up, x in given]
    rotations = rope_rotations(args, torch.arange(tokens), dtype)

    def run() -> None:
        made = [(rotate(q, rotations), F.silu(gate) * up, x + x) for q, gate, up, x in given]
        while made:
            torch.autograd.grad(made.pop(), given[len(made)], gradients[len(made)])

    with _Calls() as calls:
        run()
    return calls.bytes / _seconds(run)


def _norms(args: ModelArgs, tokens: int, dtype: torch.dtype) -> float:
    """Bytes a second of norms."""
    weight = torch.ones(args.dim, dtype=dtype, requires_grad=True)
    size = tokens * args.dim * dtype.itemsize
    given = [
        torch.randn(tokens, args.dim, dtype=dtype, requires_grad=True) for _ in range(_times(size, args))
    ]
    gradients = [torch.randn_like(each) for each in given]

    def run() -> None:
        made = [rms_norm(each, weight, args.norm_eps)[0] for each in given]
        while made:
            torch.autograd.grad(made.pop(), (given[len(made)], weight), gradients[len(made)])

    return 5 * len(given) * size / _seconds(run)


def _loss(vocabulary: int, dtype: torch.dtype) -> float:
    """Bytes a second of the head's loss, as its operations read and write them."""
    tokens = max(1, _LOGITS // vocabulary)
    hidden, weight = (
        torch.randn(count, _NARROW, dtype=dtype, requires_grad=True) for count in (tokens, vocabulary)
    )
    labels = torch.arange(tokens) % vocabulary

    def run() -> None:
        torch.autograd.grad(linear_losses(hidden, weight, labels).sum(), (hidden, weight))

    with _Calls() as calls:
        run()
    return calls.bytes / _seconds(run)


def _update(numbers: int) -> float:
    """Bytes a second of the norm of gradients, of clipping and of the update."""
    parameter = torch.zeros(numbers, requires_grad=True)
    parameter.grad = gradient = torch.ones(numbers)
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def run() -> None:
        [norm] = norms([gradient])
        update_ahead(optimizer, sound=torch.tensor(True), norm=norm, max_norm=1.0)

    return 36 * numbers / _seconds(run)


def _copies(numbers: int, dtype: torch.dtype) -> float:
    """Bytes a second of FSDP's copies: of what is stored in ``dtype``, of what was gathered, and of gradients
    in fp32."""
    units = [
        [torch.randn(_SIDE, _SIDE) for _ in range(_MATRICES)]
        for _ in range(max(1, numbers // (_MATRICES * _SIDE**2)))
    ]

    def run() -> None:
        reduced = []
        for unit in units:
            gathered = [each.to(dtype, copy=True) for each in unit]
            reduced.append(torch.empty(1, _MATRICES * _SIDE**2))
            chunk_cat([each.clone() for each in gathered], 0, 1, out=reduced[-1])

    return (8 + 4 * dtype.itemsize) * len(units) * _MATRICES * _SIDE**2 / _seconds(run)


def _times(size: int, args: ModelArgs) -> int:
    """How many times so many bytes of a block are measured."""
    return max(1, min(args.n_layers, -(-_UNCACHED // size)))


def _seconds(run: Callable[[], object]) -> float:
    """The mean time of ``run`` in the middle of some windows, the longest of all ranks': where ranks share
    cores, a window is long enough for each to wait for the others."""
    run()
    means = []
    for _ in range(_WINDOWS):
        if dist.is_initialized():
            dist.barrier()
        started, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - started) < _WINDOW or count == 0:
            run()
            count += 1
        means.append(spent / count)
    return _longest(statistics.median(means))


def _alike(run: Callable[[], object], count: int) -> float:
    """The mean time of ``run``, in which ranks meet, so that all run it ``count`` times."""
    run()
    means = []
    for _ in range(_WINDOWS):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(count):
            run()
        means.append((time.perf_counter() - started) / count)
    return _longest(statistics.median(means))


def _longest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


class _Calls(TorchDispatchMode):
    """Counts operations that are no views, and what those read and write that are no products either."""

    count = bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.count += 1
            if function.overloadpacket not in flop_registry:
                self.bytes += sum(it.nbytes for it in tree_iter((args, result)) if isinstance(it, Tensor))
        return result


def _launches(args: ModelArgs) -> tuple[float, float]:
    """Seconds of an operation on numbers so few that only its call takes time, in a model's forward and
    backward, and of what FSDP does for a unit there, over all ranks."""
    few: Any = {"dim": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "ffn_dim": 16, "vocab_size": 16}
    model = Decoder(replace(args, n_layers=4, **few))
    tokens = torch.zeros(1, 8, dtype=torch.int64)

    def step() -> None:
        model(tokens, labels=tokens).backward()

    with _Calls() as calls:
        step()
    alone = _seconds(step)
    if not dist.is_initialized():
        return alone / calls.count, 0.0
    units = [[block] for block in model.layers.values()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_fsdp(model, units, mesh, Parallelism(), precision=MixedPrecisionPolicy())
    return alone / calls.count, (_alike(step, 5) - alone) / (len(units) + 1)


def _sending() -> tuple[float, float]:
    """Bytes a second that a rank sends in a ring, and the seconds of a hop, between products, after which
    ranks are not quite at the same time there and their caches hold something else. The more work between,
    the longer they wait: the longer of a hop between short and long work counts."""
    size = dist.get_world_size()
    few, part, factor = torch.zeros(size), torch.zeros(_SENT // 4), torch.ones(_BETWEEN, _BETWEEN)
    operations: Any = functional_collectives  # as tensor parallelism gathers
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
