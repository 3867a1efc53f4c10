"""Where the time of a profiled step went, read from the trace that torch.profiler wrote. Imports no torch.

Every instant of a step belongs to one part, so that the parts add up to its wall time. On CUDA it
is that of a kernel on the device, named by the operator that launched it; in a trace without kernels
that of the innermost operator on the training thread. A collective, on its own stream or thread, counts
where no computation runs; the whole of it is told beside. What is left is waiting for data, or the host.

A matmul is `linear` also in the output head: `loss` is log-softmax, the choice of the label's entry, and
their backwards. Collectives include packing for them, and waiting for a slower rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Event = Mapping[str, Any]

COMPUTATION = ("linear", "attention", "loss", "optimizer", "other")
COMMUNICATION, DATA, HOST = "communication", "data", "host"
PARTS = (*COMPUTATION, COMMUNICATION, DATA, HOST)
APART = "apart"
"""Time in the window that belongs to no step: validation, checkpoints."""

_STEP = "ProfilerStep#"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_ABOUT = {"other": "norms, rotations, casts, clipping", HOST: "nothing ran"}

# The first that fits wins. Names of operators and of ranges:
_OPERATORS = (
    (APART, re.compile(r"^toolkit::(validation|checkpoint)")),
    (DATA, re.compile(r"^toolkit::data|^enumerate\(DataLoader\)")),
    ("optimizer", re.compile(r"^Optimizer\.|_fused_adam")),
    (COMMUNICATION, re.compile(r"^(_?c10d(_functional)?::|gloo:|nccl:|fsdp::|FSDP::|record_param_comms)")),
    ("loss", re.compile(r"log_softmax|nll_loss|cross_entropy|logsumexp")),
    # A batched matmul or a plain softmax is attention that was written out: weights meet in mm.
    (
        "attention",
        re.compile(
            r"scaled_dot_product|flash_att|flex_att|varlen_att|blockwise_att|efficient_attention"
            r"|cudnn_attention"
            r"|^aten::(_softmax|softmax|_softmax_backward_data|bmm|baddbmm)$"
        ),
    ),
    ("linear", re.compile(r"^aten::(mm|addmm|linear|matmul|_scaled_mm|_grouped_mm)$")),
)
# … and of kernels, where the operator says nothing: those that a compiler fused.
_KERNEL_NAMES = (
    (COMMUNICATION, re.compile(r"^nccl", re.IGNORECASE)),
    ("loss", re.compile(r"log_softmax|nll_loss|cross_entropy|logsumexp")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)),
    ("optimizer", re.compile(r"fused_?adam", re.IGNORECASE)),
    ("linear", re.compile(r"gemm|nvjet|cutlass|xmma|cijk|triton_tem_fused.*mm", re.IGNORECASE)),
)
# Whatever runs inside of these is theirs, a matmul too.
_OWNING = frozenset({APART, DATA, "optimizer", "loss", "attention"})
# Nodes of the backward pass: with activation checkpointing a block's whole forward may run inside of one.
_NODE = re.compile(r"^autograd::engine::|Backward\d*$|^torch::autograd::")


@dataclass(frozen=True)
class Split:
    """Milliseconds a step: of each part, their sum ``wall``, all ``communication`` and the share of it
    that ran while something was computed. ``steps`` were averaged; ``unnamed``: some ran kernels that a
    compiler fused for the CPU, of which a trace does not say what they computed."""

    parts: dict[str, float]
    communication: float
    overlapped: float
    steps: int
    unnamed: bool = False

    @property
    def wall(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        lines = []
        for part, spent in self.parts.items():
            line = f"  {part:<14}{spent:10.1f} ms {spent / self.wall:7.1%}"
            about = _ABOUT.get(part, "")
            if part == COMMUNICATION and self.overlapped:
                about = f"of {self.communication:.1f} ms, {self.overlapped:.1f} ms are under computation"
            if part == "other" and self.unnamed:
                about += ", and all that was compiled but matmuls and attention"
            lines.append(f"{line}  {about}".rstrip())
        return "\n".join(lines)


def split(trace: Iterable[Event]) -> Split | None:
    """Split the steps in ``trace``, the ``traceEvents`` of a Chrome trace; None if it holds no step."""
    events = [event for event in trace if event.get("ph") == "X" and "dur" in event]
    steps = [
        event for event in events if event["name"].startswith(_STEP) and event["cat"] == "user_annotation"
    ]
    if not steps:
        return None
    kernels = [event for event in events if event["cat"] in _KERNELS]
    ranges, operators = _cpu_ranges(events, main=steps[0]["tid"], kernels=bool(kernels))
    for kernel in kernels:
        part = _kernel_part(kernel["name"], operators.get(_external_id(kernel), ""))
        ranges.append((kernel["ts"], kernel["ts"] + kernel["dur"], part))
    windows = [(step["ts"], step["ts"] + step["dur"]) for step in steps]
    compiled = any("CompiledFxGraph" in event["name"] for event in events)
    return replace(_sweep(windows, ranges), unnamed=compiled and not kernels)


Range = tuple[float, float, str]


def _cpu_ranges(events: list[Event], *, main: int, kernels: bool) -> tuple[list[Range], dict[int, str]]:
    """Work of the threads, as ranges that do not overlap within a thread, and the part of each operator
    by its id. Where there are ``kernels``, the CPU counts only for what keeps the device waiting."""
    threads: dict[tuple[Any, int], list[Event]] = {}
    for event in events:
        if event["cat"] in ("cpu_op", "user_annotation"):
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    ranges: list[Range] = []
    operators: dict[int, str] = {}
    for (_, thread), thread_events in threads.items():
        for start, end, part in _innermost(thread_events, operators):
            if kernels:
                counts = thread == main and part in (DATA, APART)
            else:
                counts = thread == main or part == COMMUNICATION
            if counts:
                ranges.append((start, end, part))
    return ranges, operators


def _innermost(events: list[Event], operators: dict[int, str]) -> list[Range]:
    """Cut a thread's nested events into the ranges in which each was the innermost."""
    ranges: list[Range] = []
    stack: list[tuple[float, str, str]] = []  # (end, part of its own time, part that it hands down)
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now
        if stack and to > now:
            ranges.append((now, to, stack[-1][1]))
        now = max(now, to)

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while stack and stack[-1][0] <= event["ts"]:
            advance(stack[-1][0])
            stack.pop()
        advance(event["ts"])
        own, inside = _operator_part(event, stack[-1][2] if stack else "")
        if identity := _external_id(event):
            operators[identity] = inside
        stack.append((event["ts"] + event["dur"], own, inside))
    while stack:
        advance(stack[-1][0])
        stack.pop()
    return ranges


def _operator_part(event: Event, around: str) -> tuple[str, str]:
    """(part of an operator's own time, part of what it encloses that has no name of its own)."""
    name = event["name"]
    if _NODE.search(name) or name.startswith(_STEP):
        return (around if around in (APART, DATA) else HOST), (around if around == APART else "")
    part = around if around in _OWNING else _first(_OPERATORS, name) or around
    if event["cat"] == "cpu_op" or part in (APART, DATA, "optimizer") or name.startswith("gloo:"):
        return part or "other", part
    # A range is a name for Python that runs; that of a compiled graph is all that is seen of its kernels.
    return ("other" if "Compiled" in name else HOST), part


def _kernel_part(name: str, operator: str) -> str:
    if name.lower().startswith("nccl"):
        return COMMUNICATION
    return operator or _first(_KERNEL_NAMES, name) or "other"


def _first(rules: Iterable[tuple[str, re.Pattern[str]]], name: str) -> str:
    return next((part for part, pattern in rules if pattern.search(name)), "")


def _external_id(event: Event) -> int:
    """By which a kernel and the operator that launched it name one another; 0 for none."""
    return event.get("args", {}).get("External id", 0)


def _sweep(windows: list[tuple[float, float]], ranges: list[Range]) -> Split:
    """Give every instant of the windows to the first of the parts that are active then."""
    changes = [(start, 1, "window") for start, _ in windows] + [(end, -1, "window") for _, end in windows]
    for start, end, part in ranges:
        changes += [(start, 1, part), (end, -1, part)]
    changes.sort(key=lambda change: change[0])
    spent, active = dict.fromkeys(PARTS, 0.0), Counter[str]()
    communication = overlapped = before = 0.0
    for now, change, what in changes:
        passed, before = now - before, now
        if active["window"] and not active[APART] and passed > 0:
            part = next((part for part in PARTS if active[part]), HOST)
            spent[part] += passed
            if active[COMMUNICATION]:
                communication += passed
                overlapped += passed * (part in COMPUTATION)
        active[what] += change
    scale: Callable[[float], float] = lambda micros: micros / 1000 / len(windows)  # noqa: E731
    return Split(
        {part: scale(micros) for part, micros in spent.items()},
        scale(communication),
        scale(overlapped),
        len(windows),
    )
