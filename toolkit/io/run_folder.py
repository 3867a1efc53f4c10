"""Lock the folders to which a run writes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from toolkit.config import Config
from toolkit.config.local_paths import expand_user
from toolkit.distributed.agreement import Ranks
from toolkit.errors import ConfigError, Problem
from toolkit.io.locks import claim


def claim_folders(config: Config) -> ExitStack:
    """Lock the folders to which the run writes until the result is closed, and write the resolved config with
    the origin of each value. Collective, but only rank 0 writes.

    Raises:
        ConfigError: on every rank: rank 0 cannot write there, or another run is writing there.
    """
    locks = ExitStack()
    if problem := Ranks().on_rank_0(lambda: _claim(config, locks)):
        raise ConfigError(problem)
    return locks


def _claim(config: Config, locks: ExitStack) -> Problem | None:
    """Lock the folders and write the config. Returns the problem with a folder's key, if any."""
    run = expand_user(config.job.dump_folder)
    folders = {"job.dump_folder": run}
    checkpoints = expand_user(config.checkpoint.folder, inside=run)
    writes_checkpoints = config.checkpoint.enable and not config.checkpoint.load_only
    if writes_checkpoints and isinstance(checkpoints, Path) and checkpoints.resolve() != run.resolve():
        folders["checkpoint.folder"] = checkpoints
    for key, folder in folders.items():
        try:
            locks.enter_context(claim(folder))
            if folder is run:
                _write_config(config, run)
        except BlockingIOError as error:
            rule, fix = f"{error} is writing there", "wait until it ends"
        except OSError as error:
            rule, fix = f"it cannot be written to: {error}", "free space there"
        else:
            continue
        return Problem(rule, f"{fix}, or set another folder", key, config.value(key), config.origin(key))
    return None


def _write_config(config: Config, folder: Path) -> None:
    for name in {"config.toml", config.job.save_config_file or "config.toml"}:
        path = expand_user(name, inside=folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.to_toml(), encoding="utf-8")
