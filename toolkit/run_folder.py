"""Names of files in the folder of a run. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from toolkit.config import Config


def traces_prefix(config: Config) -> Path:
    """The beginning of the names of the files in which ranks tell of failed collectives."""
    folder = Path(config.job.dump_folder).expanduser() / config.comm.save_traces_folder
    return folder / config.comm.save_traces_file_prefix
