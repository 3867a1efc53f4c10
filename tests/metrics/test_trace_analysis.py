"""The split of a step: on made-up traces, whose right answer is known, and on real small steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from toolkit.metrics.trace_analysis import PARTS, StepSplit, split_steps

MAIN, OTHER, STREAM, COMM_STREAM = 1, 2, 7, 8


def event(
    name: str, start: float, end: float, *, cat: str = "cpu_op", thread: int = MAIN, id: int = 0
) -> dict[str, Any]:
    """An event between two milliseconds."""
    about = {"External id": id} if id else {}
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 0, "tid": thread, "ts": 1000 * start,
        "dur": 1000 * (end - start), "args": about,
    }  # fmt: skip


def step(start: float, end: float) -> dict[str, Any]:
    return event("ProfilerStep#3", start, end, cat="user_annotation")


def marked(name: str, start: float, end: float, thread: int = MAIN) -> dict[str, Any]:
    return event(name, start, end, cat="user_annotation", thread=thread)


def parts(*events: dict[str, Any]) -> dict[str, float]:
    found = split_steps(events)
    assert found is not None
    return {part: round(spent, 6) for part, spent in found.parts.items() if spent}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::mm", "linear"),
        ("aten::addmm", "linear"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_flash_attention_backward", "attention"),
        ("aten::bmm", "attention"),
        ("aten::_softmax_backward_data", "attention"),
        ("aten::_log_softmax", "loss"),
        ("aten::_log_softmax_backward_data", "loss"),
        ("aten::nll_loss_backward", "loss"),
        ("aten::_fused_adamw_", "optimizer"),
        ("c10d::allreduce_", "communication"),
        ("_c10d_functional::all_gather_into_tensor", "communication"),
        ("fsdp::chunk_cat", "communication"),
        ("aten::_fused_rms_norm", "other"),
        ("aten::mul", "other"),
        ("autograd::engine::evaluate_function: MmBackward0", "host"),
    ],
)
def test_an_operator_belongs_to_a_part(name: str, part: str) -> None:
    assert parts(step(0, 10), event(name, 0, 10)) == {part: 10}


def test_an_operator_inherits_and_a_node_of_the_backward_pass_does_not() -> None:
    assert parts(
        step(0, 10),
        event("aten::nll_loss_backward", 0, 4),
        event("aten::fill_", 1, 3),  # of the loss
        event("MmBackward0", 4, 10),  # a block is computed again inside of it
        event("aten::mul", 5, 6),
        event("aten::mm", 6, 8),
    ) == {"loss": 4, "linear": 2, "other": 1, "host": 3}


def test_what_owns_its_inside() -> None:
    assert parts(
        step(0, 10),
        marked("Optimizer.step#Muon.step", 0, 3),
        event("aten::mm", 1, 2),
        event("aten::scaled_dot_product_attention", 3, 6),
        event("aten::matmul", 4, 5),
        marked("toolkit::data", 6, 9),
        event("aten::stack", 7, 8),
    ) == {"optimizer": 3, "attention": 3, "data": 3, "host": 1}


def test_a_collective_on_its_thread_counts_where_nothing_is_computed() -> None:
    found = split_steps(
        [
            step(0, 10),
            event("aten::mm", 1, 4),
            marked("gloo:all_gather", 2, 7, thread=OTHER),
            event("aten::copy_", 3, 6, thread=OTHER),  # gloo's own
        ]
    )
    assert found is not None
    assert found.parts["linear"] == 3 and found.parts["communication"] == 3 and found.parts["host"] == 4
    assert (found.communication, found.overlapped) == (5, 2)
    assert "of 5.0 ms, 2.0 ms overlap with computation" in str(found)


def test_what_a_compiler_fused_for_the_cpu_has_no_name() -> None:
    found = split_steps([step(0, 9), marked("## Call CompiledFxGraph f7 ##", 1, 8), event("aten::mm", 3, 5)])
    assert found is not None
    assert (found.parts["other"], found.parts["linear"], found.parts["host"]) == (5, 2, 2)
    assert "all compiled code" in str(found)


def test_validation_and_checkpoints_are_of_no_step() -> None:
    trace = [
        step(0, 10),
        marked("toolkit::validation", 0, 6),
        event("aten::mm", 1, 5),
        event("aten::mm", 7, 8),
    ]
    assert parts(*trace) == {"linear": 1, "host": 3}


def test_kernels_are_known_by_the_operator_that_launched_them() -> None:
    found = split_steps(
        [
            step(0, 20),
            # the host runs ahead of the device
            event("aten::mm", 1, 2, id=11),
            event("aten::mul", 2, 3, id=12),
            marked("toolkit::data", 15, 18),
            event("nvjet_tst_128", 4, 8, cat="kernel", thread=STREAM, id=11),
            event("elementwise_kernel", 8, 9, cat="kernel", thread=STREAM, id=12),
            event("triton_red_fused__log_softmax_nll_loss", 9, 11, cat="kernel", thread=STREAM, id=99),
            event("flash_fwd_kernel", 11, 12, cat="kernel", thread=STREAM),
            event("ncclDevKernel_AllGather_RING_LL", 6, 14, cat="kernel", thread=COMM_STREAM),
            event("gpu annotation", 0, 20, cat="gpu_user_annotation", thread=STREAM),
        ]
    )
    assert found is not None
    assert found.parts == {
        "linear": 4, "attention": 1, "loss": 2, "optimizer": 0, "other": 1,
        "communication": 2, "data": 3, "host": 7,
    }  # fmt: skip
    assert (found.communication, found.overlapped) == (8, 6)


def test_several_steps_are_averaged_and_none_is_none() -> None:
    trace = [step(0, 10), event("aten::mm", 6, 10), step(10, 30), event("aten::mm", 10, 16)]
    assert parts(*trace) == {"linear": 5, "host": 10}
    assert split_steps([event("aten::mm", 0, 1)]) is None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute on one thread: several wait for one another where other work shares the cores, in any part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def profiled(tmp_path: Path, run: Any) -> StepSplit:
    """The split of a second call of ``run``, traced as a step."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("ProfilerStep#1"):
        run()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    found = split_steps(json.loads(path.read_text())["traceEvents"])
    assert found is not None
    return found


def test_real_linear_layers_forward_and_backward(tmp_path: Path, one_thread: None) -> None:
    weight = torch.randn(512, 512, requires_grad=True)
    tokens = torch.randn(512, 512)
    found = profiled(tmp_path, lambda: (tokens @ weight).sum().backward())
    assert found.parts["linear"] > 0.5 * found.wall
    assert found.wall == pytest.approx(sum(found.parts[part] for part in PARTS))


@pytest.mark.parametrize("again", [False, True])
def test_real_attention_and_loss(tmp_path: Path, one_thread: None, again: bool) -> None:
    queries = torch.randn(2, 8, 512, 32, requires_grad=True)
    logits = torch.randn(512, 4096, requires_grad=True)
    labels = torch.zeros(512, dtype=torch.int64)
    attend = lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731

    def run() -> None:
        out = checkpoint(attend, queries, use_reentrant=False) if again else attend(queries)
        (out.sum() + torch.nn.functional.cross_entropy(logits, labels)).backward()

    found = profiled(tmp_path, run)
    assert found.parts["attention"] > 0.05 * found.wall and found.parts["loss"] > 0.05 * found.wall
    assert found.parts["attention"] + found.parts["loss"] > 0.5 * found.wall
    assert found.parts["linear"] < 0.05 * found.wall
