"""Rules about the libraries and operators that compute on CPUs."""

from __future__ import annotations

from toolkit.preflight.planned_run import PlannedRun, note


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
