"""Rules about what the run reads and writes."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.data.sources import check_source
from toolkit.errors import DataError, Problem
from toolkit.preflight.facts import Run, rule


@rule(DataError)
def corpus_readable(run: Run) -> list[Problem]:
    """Each corpus is there and has the column."""
    config = run.config
    tables = ["training"] + (["validation"] if config.validation.enable else [])
    problems = []
    for table in tables:
        options = config.value(table)
        found = check_source(options.dataset, options.dataset_path, config.data.text_column)
        if found:
            key = f"data.{found.key}" if found.key == "text_column" else f"{table}.{found.key}"
            problems.append(run.problem(key, found.rule, found.fix))
    return list(dict.fromkeys(problems))


@rule()
def folders_writable(run: Run) -> list[Problem]:
    """The run can create the folders that it writes to."""
    problems = []
    for key in ("job.dump_folder", "data.cache_folder"):
        place = Path(run.config.value(key)).expanduser().absolute()
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            problems.append(run.problem(key, f"{place} is not a folder", "name another folder"))
        elif not os.access(place, os.W_OK | os.X_OK):
            fix = "name another folder, or give this user permission to write there"
            problems.append(run.problem(key, f"{place} cannot be written to", fix))
    return problems
