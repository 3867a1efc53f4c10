"""Rules about the libraries and operators that compute on CPUs."""

from __future__ import annotations

from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, note, rule


@rule()
def onednn_is_for_cpus(run: PlannedRun) -> list[Problem]:
    """oneDNN multiplies on CPUs."""
    if run.config.model.matmul != "onednn" or run.hardware.device == "cpu":
        return []
    return [run.problem("model.matmul", "oneDNN multiplies on CPUs, this run is on GPUs", "remove it")]


@note
def matmul_notes(run: PlannedRun) -> list[str]:
    """Tell where the choice has nothing to choose."""
    if run.config.model.matmul == "auto":
        return []
    if run.hardware.device != "cpu":
        return ["model.matmul changes nothing: GPUs multiply by cuBLAS"]
    if run.precision != "float32":
        return [f"model.matmul changes nothing: products are of {run.precision}, which torch gives to oneDNN"]
    return []


@note
def norm_notes(run: PlannedRun) -> list[str]:
    """Tell where torch's norms are taken in any case."""
    if run.config.model.norm == "auto":
        return []
    if run.hardware.device != "cpu":
        return ["model.norm changes nothing: GPUs have a kernel for it, which is torch's"]
    if run.config.compile.blocks:
        return ["model.norm changes nothing: the compiler fuses torch's operators"]
    return []
