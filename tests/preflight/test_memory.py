"""Rules of ``rules.memory`` about what is installed."""

from __future__ import annotations

import sys

import pytest

from tests.preflight.bad_runs import CPU, V100, configure
from toolkit.preflight.planned_run import PlannedRun
from toolkit.preflight.rules.memory import compile_backend, memory_budget_needs


def test_inductor_needs_a_compiler_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = configure(["--compile.enable"])
    [problem] = compile_backend(PlannedRun(config, 1, CPU))
    assert "no compiler no-such-compiler" in problem.rule
    assert "g++" in problem.fix and "aot_eager" in problem.fix
    assert compile_backend(PlannedRun(config, 1, V100)) == [], "Triton compiles there"
    assert (
        compile_backend(PlannedRun(configure(["--compile.enable", "--compile.backend=eager"]), 1, CPU)) == []
    )
    monkeypatch.setenv("CXX", sys.executable)
    assert compile_backend(PlannedRun(config, 1, CPU)) == []


def test_the_picture_of_the_budget_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [
        "--activation_checkpoint.mode=memory_budget",
        "--activation_checkpoint.visualize_memory_budget_pareto",
        "--compile.enable",
    ]
    assert memory_budget_needs(PlannedRun(configure(flags), 1, CPU)) == []
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    [problem] = memory_budget_needs(PlannedRun(configure(flags), 1, CPU))
    assert problem.key == "activation_checkpoint.visualize_memory_budget_pareto"
    assert "'.[plot]'" in problem.fix


def test_what_acts_is_not_refused() -> None:
    for flags in (
        ["--activation_checkpoint.mode=memory_budget", "--activation_checkpoint.memory_budget=0.3"],
        ["--activation_checkpoint.selective_ac_option=op", "--activation_checkpoint.early_stop"],
        ["--activation_checkpoint.selective_ac_option=matmul"],
    ):
        run = PlannedRun(configure([*flags, "--compile.enable", "--compile.components=model"]), 1, V100)
        assert memory_budget_needs(run) == [] and compile_backend(run) == []
