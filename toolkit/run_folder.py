"""Where the folder of a run holds what its ranks tell. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from toolkit.config import Config


def traces_prefix(config: Config) -> Path:
    """What the names of the files begin with in which ranks tell of failed collectives."""
    folder = Path(config.job.dump_folder).expanduser() / config.comm.save_traces_folder
    return folder / config.comm.save_traces_file_prefix
