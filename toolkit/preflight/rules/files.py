"""Rules about what the run reads and writes."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.errors import Problem
from toolkit.preflight.planned_run import PlannedRun, rule


@rule()
def folders_writable(run: PlannedRun) -> list[Problem]:
    """The run can create the folders that it writes to."""
    config = run.config
    folders = {"job.dump_folder": config.job.dump_folder}
    if not Path(os.path.expanduser(config.data.cache_folder), "tokens").is_dir():  # else it may have all
        folders["data.cache_folder"] = config.data.cache_folder
    if config.checkpoint.enable:
        folders["checkpoint.folder"] = str(run.checkpoints)
    if config.metrics.enable_tensorboard:
        folders["metrics.save_tb_folder"] = str(run.dump_folder / config.metrics.save_tb_folder)
    if config.compile.enable and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # which goes before it
        folders["compile.cache_folder"] = config.compile.cache_folder
    problems: dict[str, Problem] = {}  # by rule: what is wrong with a folder is so of those inside it
    for key, folder in folders.items():
        rule, fix = _unusable(folder)
        if rule:
            problems.setdefault(rule, run.problem(key, rule, fix))
    return list(problems.values())


def _unusable(folder: str) -> tuple[str, str]:
    """Why a folder cannot be written to or made, and what to do; "" where it can."""
    place = Path(os.path.expanduser(folder)).absolute()
    if not folder:
        return "the name of the folder is empty", 'name a folder; "." is the present one'
    if os.path.expanduser(folder).startswith("~"):
        return f"there is no user {Path(folder).parts[0][1:]}, whose folder ~ would be", "name a folder"
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a folder", "name another folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return (
            f"{place} cannot be written to",
            "name another folder, or give this user permission to write there",
        )
    return "", ""
