"""Rules about tensor and context parallelism: what is cut within a layer and along a sequence."""

from __future__ import annotations

import math
import os

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
"""Compute capability from which GPUs have the copies between them that async TP is made of."""


@rule()
def tensor_parallel_divides(run: PlannedRun) -> list[Problem]:
    """A dimension that tp shards has equal shards."""
    tp, model = run.config.parallelism.tensor_parallel_degree, run.model
    if model is None or tp == 1:
        return []
    problems = []
    for name in ("n_heads", "n_kv_heads"):
        if getattr(model, name) % tp:
            fitting = divisors(math.gcd(model.n_heads, model.n_kv_heads))
            fix = f"tensor_parallel_degree can be {join_or(fitting)}"
            problems.append(run.problem(_TP, f"must divide {name}, which is {getattr(model, name)}", fix))
    for name in ("vocab_size", "ffn_dim"):
        size = getattr(model, name)
        if size % tp:
            fix = f"the nearest size that does is model.{name} = {_nearest_size(name, size, tp)}"
            problems.append(run.problem(_TP, f"must divide {name}, which is {size}", fix))
    return problems


def _nearest_size(name: str, size: int, tp: int) -> int:
    # A vocabulary may grow, but not lose tokens.
    return -(-size // tp) * tp if name == "vocab_size" else nearest_multiple(size, tp)


@rule()
def async_tensor_parallel_runs(run: PlannedRun) -> list[Problem]:
    """Matmuls that overlap their communication are made by the compiler, of copies between GPUs."""
    options, compiling = run.config.parallelism, run.config.compile
    if not options.enable_async_tensor_parallel or options.tensor_parallel_degree == 1:
        return []
    if run.hardware.capability < _SYMMETRIC_MEMORY:
        rule = (
            f"needs GPUs that read one another's memory over NVLink, of compute capability "
            f"{_SYMMETRIC_MEMORY} or above; this is {run.hardware.name}"
        )
        return [run.problem(_ASYNC, rule, "remove it: the same is computed without overlap")]
    if not compiling.enable or "model" not in compiling.components:
        fix = 'set compile.enable = true with "model" in compile.components, or remove it'
        return [run.problem(_ASYNC, "the compiler makes it, and the model is not compiled", fix)]
    if compiling.backend != "inductor":
        fix = 'set compile.backend = "inductor", or remove it'
        return [run.problem(_ASYNC, f"inductor makes it, and compile.backend is {compiling.backend}", fix)]
    return []


@rule()
def sequence_divides(run: PlannedRun) -> list[Problem]:
    """Context parallelism cuts a sequence into equal pieces, and tp cuts each of them again."""
    options = run.config.parallelism
    cp, tp = options.context_parallel_degree, options.tensor_parallel_degree
    balanced = options.context_parallel_load_balancer is not None and cp > 1
    unit = cp * (2 if balanced else 1) * tp
    parts = [f"2·cp = {2 * cp}" if balanced else f"cp = {cp}"] if cp > 1 else []
    parts += [f"tp = {tp}"] if tp > 1 else []
    validation = ["validation.seq_len"] if run.config.validation.enable else []
    problems = []
    for key in ["training.seq_len", *validation]:
        length = run.config.value(key)
        if length % unit == 0:
            continue
        rule = f"must be a multiple of {' × '.join(parts)}{f', that is {unit}' if len(parts) > 1 else ''}"
        fix = f"the nearest is {nearest_multiple(length, unit)}"
        less = [degree for degree in divisors(cp)[1:-1] if length % (unit // cp * degree) == 0]
        problems.append(run.problem(key, rule, f"{fix}, or set {_CP} to {less[-1]}" if less else fix))
    return problems


@rule()
def ring_has_a_kernel(run: PlannedRun) -> list[Problem]:
    """A ring adds up parts of attention, for which only the flash kernel says what it needs to know."""
    if not _takes_ring(run):
        return []
    from toolkit.preflight.rules.attention import active_window

    choice, on_gpu = run.attention, run.hardware.device != "cpu"
    head_dim, window = run.model.head_dim if run.model else 8, active_window(run) if on_gpu else None
    misfits = [
        (choice not in ("sdpa", "flash", "blockwise"), f"is not {choice}", 'model.attention = "flash"'),
        (
            on_gpu and run.precision != "bfloat16",
            "computes in bfloat16, this run in float32",
            'training.mixed_precision_param = "bfloat16"',
        ),
        (
            on_gpu and (head_dim % 8 > 0 or head_dim > 256),
            f"needs heads of a multiple of 8, at most 256 dimensions, these have {head_dim}",
            "another model.head_dim",
        ),
        (
            window is not None,
            f"has no window, and the model's, of {window} tokens, is shorter than a sequence",
            f"training.seq_len to {window} or less",
        ),
    ]
    return [
        run.problem(_ROTATE, f"a ring takes the flash kernel, which {why}", f'set {fix}, or keep "allgather"')
        for wrong, why, fix in misfits
        if wrong
    ]


def _takes_ring(run: PlannedRun) -> bool:
    options, documents = run.config.parallelism, run.config.data.document_mask
    return uses_ring(options, device=run.hardware.device, documents=documents)


@note
def tensor_notes(run: PlannedRun) -> list[str]:
    """Layouts that work and are slow, and what is computed otherwise than asked."""
    options, said = run.config.parallelism, []
    tp, here = options.tensor_parallel_degree, _ranks_of_a_node()
    if here and tp > here:
        said.append(
            f"{_TP} {tp} is more than the {here} ranks of a node: every block waits four times for the "
            f"network between nodes; {_CP} and {_PP} ask less of it"
        )
    if tp > 1 and options.disable_loss_parallel:
        said.append(
            f"parallelism.disable_loss_parallel gathers all logits on each of {tp} ranks, which then compute "
            "the same loss; without it three numbers a token are exchanged"
        )
    ring = options.context_parallel_rotate_method == "alltoall" and options.context_parallel_degree > 1
    if ring and not _takes_ring(run):
        said.append(
            f'{_ROTATE} = "alltoall" gathers, as "allgather" does: a ring takes the flash kernel, which '
            "on CUDA has no mask for documents; data.document_mask = false has a ring"
        )
    return said


def _ranks_of_a_node() -> int | None:
    """As torchrun says, or who asks for a launch: this machine may not be one of the run's."""
    said = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("NGPU", "")
    return int(said) if is_number(said) else None
