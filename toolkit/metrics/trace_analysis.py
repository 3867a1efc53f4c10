"""Split the time of a profiled step by part, from a torch.profiler trace. Imports no torch.

Every instant of a step belongs to one part, so the parts add up to its wall time. On CUDA, it is the part of
the running kernel, derived from the operator that launched the kernel; without kernels, it is the part of the
innermost operator on the training thread. Communication counts only while no computation runs; its total is
reported separately. The rest is host time, or waiting for data.

The matmul of the output head counts as `linear`; `loss` is log-softmax, the selection of the label's entry,
and their backward. Communication includes packing and waiting for slower ranks.
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
EXCLUDED = "excluded"
"""Parts that do not count as step time: validation, checkpoints."""

_STEP = "ProfilerStep#"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_NOTES = {"other": "norms, RoPE, casts, clipping", HOST: "nothing ran"}

# The first match wins. Names of operators and ranges:
_OPERATORS = (
    (EXCLUDED, re.compile(r"^toolkit::(validation|checkpoint)")),
    (DATA, re.compile(r"^toolkit::data|^enumerate\(DataLoader\)")),
    ("optimizer", re.compile(r"^Optimizer\.|_fused_adam")),
    (COMMUNICATION, re.compile(r"^(_?c10d(_functional)?::|gloo:|nccl:|fsdp::|FSDP::|record_param_comms)")),
    ("loss", re.compile(r"log_softmax|nll_loss|cross_entropy|logsumexp")),
    # bmm and softmax come from unfused attention; linear layers use mm.
    (
        "attention",
        re.compile(
            r"scaled_dot_product|flash_att|flex_att|varlen_att|blockwise_att|efficient_attention"
            r"|cudnn_attention"
            r"|^aten::(_softmax|softmax|_softmax_backward_data|bmm|baddbmm)$"
        ),
    ),
    ("linear", re.compile(r"^(aten::(mm|addmm|linear|matmul|_scaled_mm|_grouped_mm)|mkldnn::_linear_.*)$")),
)
# … and of kernels without a known operator, such as those fused by a compiler.
_KERNEL_NAMES = (
    (COMMUNICATION, re.compile(r"^nccl", re.IGNORECASE)),
    ("loss", re.compile(r"log_softmax|nll_loss|cross_entropy|logsumexp")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)),
    ("optimizer", re.compile(r"fused_?adam", re.IGNORECASE)),
    ("linear", re.compile(r"gemm|nvjet|cutlass|xmma|cijk|triton_tem_fused.*mm", re.IGNORECASE)),
)
# Everything that runs inside one of these belongs to it, including matmuls.
_ENCLOSING = frozenset({EXCLUDED, DATA, "optimizer", "loss", "attention"})
# Autograd nodes: with activation checkpointing, a block's whole forward may run inside one.
_NODE = re.compile(r"^autograd::engine::|Backward\d*$|^torch::autograd::")


@dataclass(frozen=True)
class StepSplit:
    """Milliseconds per step, averaged over ``steps``.

    Attributes:
        parts: time of each part; ``wall`` is their sum.
        communication: all communication; ``overlapped`` ran during computation.
        unnamed: True if CPU kernels fused by a compiler ran; the trace does not name their operators.
    """

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
            note = _NOTES.get(part, "")
            if part == COMMUNICATION and self.overlapped:
                note = f"of {self.communication:.1f} ms, {self.overlapped:.1f} ms overlap with computation"
            if part == "other" and self.unnamed:
                note += ", and all compiled code except matmuls and attention"
            lines.append(f"{line}  {note}".rstrip())
        return "\n".join(lines)


def split_steps(trace: Iterable[Event]) -> StepSplit | None:
    """Split the steps in ``trace``, the ``traceEvents`` of a Chrome trace; None if it contains no step."""
    events = [event for event in trace if event.get("ph") == "X" and "dur" in event]
    steps = [
        event for event in events if event["name"].startswith(_STEP) and event["cat"] == "user_annotation"
    ]
    if not steps:
        return None
    kernels = [event for event in events if event["cat"] in _KERNELS]
    ranges, operators = _thread_ranges(events, main=steps[0]["tid"], kernels=bool(kernels))
    for kernel in kernels:
        part = _kernel_part(kernel["name"], operators.get(_external_id(kernel), ""))
        ranges.append((kernel["ts"], kernel["ts"] + kernel["dur"], part))
    windows = [(step["ts"], step["ts"] + step["dur"]) for step in steps]
    compiled = any("CompiledFxGraph" in event["name"] for event in events)
    return replace(_attribute_time(windows, ranges), unnamed=compiled and not kernels)


Range = tuple[float, float, str]


def _thread_ranges(events: list[Event], *, main: int, kernels: bool) -> tuple[list[Range], dict[int, str]]:
    """Return the work ranges of the threads, disjoint within each thread, and the part of each operator by
    external id. With ``kernels``, the CPU counts only while the device waits for it."""
    threads: dict[tuple[Any, int], list[Event]] = {}
    for event in events:
        if event["cat"] in ("cpu_op", "user_annotation"):
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    ranges: list[Range] = []
    operators: dict[int, str] = {}
    for (_, thread), thread_events in threads.items():
        for start, end, part in _innermost(thread_events, operators):
            if kernels:
                counts = thread == main and part in (DATA, EXCLUDED)
            else:
                counts = thread == main or part == COMMUNICATION
            if counts:
                ranges.append((start, end, part))
    return ranges, operators


def _innermost(events: list[Event], operators: dict[int, str]) -> list[Range]:
    """Split a thread's nested events into ranges, each belonging to the innermost event."""
    ranges: list[Range] = []
    stack: list[tuple[float, str, str]] = []  # (end, own part, part of nested events)
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
        part, inside = _operator_part(event, stack[-1][2] if stack else "")
        if external_id := _external_id(event):
            operators[external_id] = inside
        stack.append((event["ts"] + event["dur"], part, inside))
    while stack:
        advance(stack[-1][0])
        stack.pop()
    return ranges


def _operator_part(event: Event, parent: str) -> tuple[str, str]:
    """Return the part of an operator's own time, and the part of nested events without a known name."""
    name = event["name"]
    if _NODE.search(name) or name.startswith(_STEP):
        return (parent if parent in (EXCLUDED, DATA) else HOST), (parent if parent == EXCLUDED else "")
    part = parent if parent in _ENCLOSING else _match(_OPERATORS, name) or parent
    if event["cat"] == "cpu_op" or part in (EXCLUDED, DATA, "optimizer") or name.startswith("gloo:"):
        return part or "other", part
    # A named range is Python code, except for a compiled graph, which represents its kernels.
    return ("other" if "Compiled" in name else HOST), part


def _kernel_part(name: str, operator: str) -> str:
    if name.lower().startswith("nccl"):
        return COMMUNICATION
    return operator or _match(_KERNEL_NAMES, name) or "other"


def _match(rules: Iterable[tuple[str, re.Pattern[str]]], name: str) -> str:
    return next((part for part, pattern in rules if pattern.search(name)), "")


def _external_id(event: Event) -> int:
    """Return the id that a kernel shares with the operator that launched it; 0 if there is none."""
    return event.get("args", {}).get("External id", 0)


def _attribute_time(windows: list[tuple[float, float]], ranges: list[Range]) -> StepSplit:
    """Attribute every instant of the windows to the first active part."""
    changes = [(start, 1, "window") for start, _ in windows] + [(end, -1, "window") for _, end in windows]
    for start, end, part in ranges:
        changes += [(start, 1, part), (end, -1, part)]
    changes.sort(key=lambda change: change[0])
    spent, active = dict.fromkeys(PARTS, 0.0), Counter[str]()
    communication = overlapped = before = 0.0
    for now, change, kind in changes:
        passed, before = now - before, now
        if active["window"] and not active[EXCLUDED] and passed > 0:
            part = next((part for part in PARTS if active[part]), HOST)
            spent[part] += passed
            if active[COMMUNICATION]:
                communication += passed
                overlapped += passed * (part in COMPUTATION)
        active[kind] += change
    scale: Callable[[float], float] = lambda micros: micros / 1000 / len(windows)  # noqa: E731
    return StepSplit(
        {part: scale(micros) for part, micros in spent.items()},
        scale(communication),
        scale(overlapped),
        len(windows),
    )
