"""Rules for tensor and context parallelism."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from toolkit.config.schema import DEFAULT
from toolkit.errors import Problem, divisors, join_or, nearest_multiple
from toolkit.launcher.environment import is_number
from toolkit.parallel.dims import uses_ring
from toolkit.preflight.planned_run import PlannedRun, note, rule

_TP = "parallelism.tensor_parallel_degree"
_CP = "parallelism.context_parallel_degree"
_PP = "parallelism.pipeline_parallel_degree"
_ROTATE = "parallelism.context_parallel_rotate_method"
_ASYNC = "parallelism.enable_async_tensor_parallel"
_SYMMETRIC_MEMORY = 9.0
"""Lowest compute capability of GPUs with direct device-to-device copies, which async TP uses."""


@rule()
def tensor_parallel_divides(run: PlannedRun) -> list[Problem]:
    """Check that the tensor-parallel degree divides the model's sizes."""
    tp, model = run.config.parallelism.tensor_parallel_degree, run.model
    if model is None or tp == 1:
        return []
    sizes = {name: getattr(model, name) for name in ("n_heads", "n_kv_heads", "vocab_size", "ffn_dim")}
    broken = {name: size for name, size in sizes.items() if size % tp}
    if not broken:
        return []
    rule = f"must divide {', and '.join(f'{name}, which is {size}' for name, size in broken.items())}"
    fitting = divisors(math.gcd(model.n_heads, model.n_kv_heads, *broken.values()))
    fix = f"set {_TP} to {join_or(fitting)}"
    if broken.keys() <= {"vocab_size", "ffn_dim"}:
        nearest = [f"model.{name} = {_nearest_size(name, size, tp)}" for name, size in broken.items()]
        fix += f"; the nearest size that fits {tp} is {' and '.join(nearest)}"
    return [run.problem(_TP, rule, fix, *(f"model.{name}" for name in broken))]


def _nearest_size(name: str, size: int, tp: int) -> int:
    # A vocabulary may grow, but not lose tokens.
    return -(-size // tp) * tp if name == "vocab_size" else nearest_multiple(size, tp)


@rule()
def async_tensor_parallel_runs(run: PlannedRun) -> list[Problem]:
    """Check that async TP, for which inductor generates code, has a compiler and GPUs that support it."""
    options, compiling = run.config.parallelism, run.config.compile
    if not options.enable_async_tensor_parallel or options.tensor_parallel_degree == 1:
        return []
    if run.hardware.capability < _SYMMETRIC_MEMORY:
        rule = (
            f"needs GPUs with direct memory access over NVLink and compute capability "
            f"{_SYMMETRIC_MEMORY} or above; this is {run.hardware.name}"
        )
        return [run.problem(_ASYNC, rule, "remove it: the results are the same without overlap")]
    if not compiling.enable or "model" not in compiling.components:
        fix = 'set compile.enable = true with "model" in compile.components, or remove it'
        return [run.problem(_ASYNC, "needs a compiled model, and the model is not compiled", fix)]
    if compiling.backend != "inductor":
        fix = 'set compile.backend = "inductor", or remove it'
        return [run.problem(_ASYNC, f"needs inductor, and compile.backend is {compiling.backend}", fix)]
    return []


@rule()
def sequence_divides(run: PlannedRun) -> Iterator[Problem]:
    """Check that the sequence length is divisible by the context-parallel degree, and the shard by the
    tensor-parallel degree."""
    options = run.config.parallelism
    cp, tp = options.context_parallel_degree, options.tensor_parallel_degree
    balanced = options.context_parallel_load_balancer is not None and cp > 1
    unit = cp * (2 if balanced else 1) * tp
    parts = [f"2·cp = {2 * cp}" if balanced else f"cp = {cp}"] if cp > 1 else []
    parts += [f"tp = {tp}"] if tp > 1 else []
    validation = ["validation.seq_len"] if run.config.validation.enable else []
    for key in ["training.seq_len", *validation]:
        length = run.config.value(key)
        if length % unit == 0:
            continue
        rule = f"must be a multiple of {' × '.join(parts)}{f', that is {unit}' if len(parts) > 1 else ''}"
        nearest = f"{key} to {nearest_multiple(length, unit)}"
        less = [size for size in divisors(cp)[:-1] if length % (unit // cp * size if size > 1 else tp) == 0]
        fixes = [f"{_CP} to {size}" for size in less[-1:]]
        if length % tp:
            fixes.append(f"{_TP} to {math.gcd(length, tp)}")
        if run.config.origin(key) != DEFAULT or not fixes:
            fixes.insert(0 if run.blame(key, _CP, _TP) == key else len(fixes), nearest)
        yield run.problem(key, rule, f"set {join_or(fixes)}", _CP, _TP)


@rule()
def ring_has_a_kernel(run: PlannedRun) -> Iterator[Problem]:
    """Check that ring attention can use the flash kernel, which returns the log-sum-exp that it needs."""
    if not _takes_ring(run):
        return
    from toolkit.preflight.rules.attention import active_window, lacks_window

    choice, on_gpu = run.attention, run.hardware.device != "cpu"
    head_dim, window = run.model.head_dim if run.model else 8, active_window(run) if on_gpu else None
    misfits = [
        (choice not in ("sdpa", "flash", "blockwise"), f"is not {choice}", 'model.attention = "flash"'),
        (
            on_gpu and run.precision != "bfloat16",
            "computes in bfloat16, while this run computes in float32",
            'training.mixed_precision_param = "bfloat16"',
        ),
        (
            on_gpu and (head_dim % 8 > 0 or head_dim > 256),
            f"needs a head_dim that is a multiple of 8 and at most 256, not {head_dim}",
            "another model.head_dim",
        ),
        (window is not None, lacks_window(run, window or 0), f"training.seq_len to {window} or less"),
    ]
    for wrong, why, fix in misfits:
        if wrong:
            rule = f"a ring uses the flash kernel, which {why}"
            yield run.problem(_ROTATE, rule, f'set {fix}, or keep "allgather"')


@rule()
def ring_takes_sinks(run: PlannedRun) -> list[Problem]:
    """Check that ring attention is not used with attention sinks."""
    if run.model is None or not run.model.sinks or not _takes_ring(run):
        return []
    rule = "ring attention does not support the attention sinks of this model"
    return [run.problem(_ROTATE, rule, 'set it to "allgather"')]


def _takes_ring(run: PlannedRun) -> bool:
    options, documents = run.config.parallelism, run.config.data.document_mask
    return uses_ring(options, device=run.hardware.device, documents=documents)


@note
def tensor_notes(run: PlannedRun) -> Iterator[str]:
    """Note layouts that work but are slow, and options that have no effect."""
    options = run.config.parallelism
    tp, ranks_per_node = options.tensor_parallel_degree, _ranks_per_node()
    if ranks_per_node and tp > ranks_per_node:
        yield (
            f"{_TP} {tp} is more than the {ranks_per_node} ranks of a node: every block waits four times for "
            f"the network between nodes; {_CP} and {_PP} communicate less"
        )
    if tp > 1 and options.disable_loss_parallel:
        yield (
            f"parallelism.disable_loss_parallel gathers all logits on each of {tp} ranks, which then compute "
            "the same loss; without it only three values per token are exchanged"
        )
    ring = options.context_parallel_rotate_method == "alltoall" and options.context_parallel_degree > 1
    if ring and not _takes_ring(run):
        yield (
            f'{_ROTATE} = "alltoall" gathers, as "allgather" does: a ring uses the flash kernel, which '
            "on CUDA supports no document mask; use data.document_mask = false for a ring"
        )


def _ranks_per_node() -> int | None:
    """Return the ranks per node set by torchrun or by the user, possibly for a launch on other machines."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("NGPU", "")
    return int(text) if is_number(text) else None
